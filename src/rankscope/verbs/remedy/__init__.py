"""``remedy``: which remedy would help?"""

from __future__ import annotations

from rankscope import options
from rankscope.execution.support import ExecutionSupport
from rankscope.options import Option
from rankscope.verbs._spec import Verb, verb

EXECUTION = ExecutionSupport(
    "remedy",
    no_offload="it backpropagates through all blocks at once",
    no_spread="a remedy adds parameters to the blocks and is backpropagated through, which needs whole weights",
)

OWN = (
    Option(
        name="remedies",
        several="names",
        in_plans=True,
        help="Remedies, separated by commas, each NAME or NAME=STRENGTH; see `ls remedies`.",
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
)

REMEDY = verb(
    Verb(
        name="remedy",
        home=__name__,
        question="Which remedy would help?",
        answer="Tries each known remedy on this model and ranks them, with gradients and parameters.",
        options=(
            options.MODEL,
            *options.TEXTS,
            options.SEQUENCES.replace(default=4),
            options.TOKENS.replace(default=64),
            options.BATCH,
            options.TOKENS_POLICY,
            options.SEED,
            *OWN,
            *options.SURGERY,
            *options.LOADING,
            *options.execution(EXECUTION.no_offload, EXECUTION.no_spread),
        ),
        columns={"remedy": "string"},
        examples=("remedy init:tiny-bert --remedies stronger_skip,pre_norm --sequences 1 --tokens 16",),
        execution=EXECUTION,
        order=70,
        in_plans=True,
    )
)
