"""An example plan that runs within seconds; its comments explain every key."""

EXAMPLE_PLAN = """\
# What to run: every verb on every model, checkpoint, variant and seed. Run it with: rankscope sweep plan.yaml
models:
  - init:tiny-bert                      # a random initialisation, a local folder or a hub name
  - model: init:tiny-gpt2
    name: little                        # how it is called in the rows; by default the spec
    seeds: [0]                          # its own seeds, verbs, inputs, dtype or memory, where others are wanted
  # - name: my-run                      # a training run: its checkpoints in order give a trajectory
  #   checkpoints:
  #     - runs/a/checkpoint-100         # the step is the last number of the name, or
  #     - {path: runs/a/final, step: 500}
  # - model: some-org/some-model        # on the hub: branches, tags or commits
  #   revisions: [step1000, step2000]

verbs:                                  # those of `rankscope ls verbs` that go in plans, each with its own options
  - measure: {metrics: [relative_residual, mean_cosine]}
  - ablate: {variants: [pure, full]}

variants:                               # surgery for measure, exact, bound and decompose; full is the whole model
  - full
  - {name: no-skip, skip: 0}            # settings of rankscope.operate, or a name from `rankscope ls variants`

seeds: [0, 1]                           # of random initialisations and random inputs
inputs: {sequences: 2, tokens: 16}      # also text: FILE, texts: [...], random_tokens, tokenizer, batch, tokens_policy
# dtype: float32
# retries: 3                            # after a lost worker or a failing disk
# cpus: 1                               # cores per task
# memory: 2 GiB                         # per task, instead of the estimate
"""
