"""``measure``: where does this model stand?"""

from rankscope import options
from rankscope.execution.support import ExecutionSupport
from rankscope.options import Option
from rankscope.verbs._spec import Show, Verb, verb

EXECUTION = ExecutionSupport("measure")

MEASURE = verb(
    Verb(
        name="measure",
        question="Where does this model stand?",
        answer="Measures a set of metrics after each block and gives a verdict with its evidence.",
        run="verbs.measure.run:measure",
        judge="verdicts:judge",
        options=(
            options.MODEL,
            *options.INPUTS,
            options.METRICS,
            options.SITES,
            Option(
                name="null",
                kind=bool,
                default=False,
                in_plans=True,
                help="Also measure Gaussian tokens of the same shape, as a baseline.",
            ),
            Option(
                name="similarity",
                kind=bool,
                default=False,
                help="Save the cosines between tokens of the first sequence, for the report.",
            ),
            Option(
                name="between_inputs",
                several="names",
                metavar="POOLING",
                in_plans=True,
                help="Compare inputs pooled by mean (default), first, last, at:POSITION; none to leave it out.",
            ),
            Option(
                name="attention_algorithm",
                flags=("--attention-algorithm", "--attention"),
                metavar="NAME",
                help="dense, blockwise or blockwise:WALKS; default: by the memory that the probabilities need.",
            ),
            options.DTYPE,
            options.BLOCKS,
            options.LAYOUT,
            *options.execution(EXECUTION.no_offload, EXECUTION.no_spread),
            options.FAIL_IF,
        ),
        show=Show(
            sections={
                "depth": "reporting.page.measure_sections:depth_section",
                "ledger": "reporting.page.ledger:ledger_section",
                "heads": "reporting.page.measure_sections:heads_section",
                "similarity": "reporting.page.measure_sections:similarity_section",
            }
        ),
        examples=(
            "measure init:tiny-bert",
            "measure init:tiny-gpt2 --sequences 4 --tokens 32 --tokens-policy no-first --out run",
            "measure init:tiny-bert --metrics relative_residual,stable_rank --sites block.out,attention.out --json",
            "measure init:tiny-llama --random-tokens --tokens 512 --sequences 1 --attention-algorithm blockwise",
        ),
        under_torchrun="torchrun --nproc-per-node 2 -m rankscope measure init:tiny-llama --tokens 16 --batch 2",
        execution=EXECUTION,
        order=10,
        in_plans=True,
        under_variants=True,
    )
)
