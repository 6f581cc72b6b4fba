"""``remedy``: which remedy would help?"""

from rankscope import options
from rankscope.execution.support import ExecutionSupport
from rankscope.options import Option
from rankscope.verbs._spec import Show, Verb, verb

EXECUTION = ExecutionSupport(
    "remedy",
    no_offload="it times whole forward passes and backpropagates through all blocks at once",
    no_spread="a remedy adds parameters to the blocks and is backpropagated through, which needs whole weights",
)

REMEDY = verb(
    Verb(
        name="remedy",
        question="Which remedy would help?",
        answer="Tries each known remedy on this model and ranks them, with gradients and cost.",
        run="verbs.remedy.run:remedy",
        judge="verbs.remedy.judge:judge_remedies",
        options=(
            options.MODEL,
            options.TEXT,
            options.TOKENIZER,
            options.RANDOM_TOKENS,
            options.SEQUENCES.but(default=4),
            options.TOKENS.but(default=64),
            options.BATCH,
            options.TOKENS_POLICY,
            options.SEED,
            Option(
                name="remedies",
                several="names",
                in_plans=True,
                help="Remedies, separated by commas, each NAME or NAME=STRENGTH; see `ls remedies`.",
            ),
            Option(
                name="variant", default="full", help="Variant to which the remedies are applied; see `ls variants`."
            ),
            Option(
                name="weights",
                choices=("given", "init"),
                default="given",
                in_plans=True,
                help="Use the given weights or a random initialisation.",
            ),
            Option(
                name="gradients",
                kind=bool,
                default=True,
                in_plans=True,
                help="Compare the gradients of queries and keys with those of values.",
            ),
            Option(
                name="repeats",
                kind=int,
                default=3,
                least=0,
                in_plans=True,
                help="Timed forward passes per remedy; 0 to skip timing.",
            ),
            options.DTYPE,
            options.DEVICE,
            options.BLOCKS,
            options.LAYOUT,
            *options.execution(EXECUTION.no_offload, EXECUTION.no_spread),
        ),
        show=Show(
            document="verbs.remedy.show:document",
            plot="verbs.remedy.show:plot",
            has_choices=False,
        ),
        columns={"remedy": "string"},
        examples=("remedy init:tiny-bert --remedies stronger_skip,pre_norm --sequences 1 --tokens 16 --repeats 0",),
        execution=EXECUTION,
        order=70,
        in_plans=True,
    )
)
