"""``remedy``: which remedy would help?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankscope import options
from rankscope.execution.support import ExecutionSupport
from rankscope.options import Option
from rankscope.runs.showing import Show
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


def _run() -> Callable[..., Any]:
    from rankscope.verbs.remedy.run import remedy

    return remedy


def _show() -> Show:
    from rankscope.verbs.remedy.show import document, plot

    return Show(document=document, plot=plot)


REMEDY = verb(
    Verb(
        name="remedy",
        question="Which remedy would help?",
        answer="Tries each known remedy on this model and ranks them, with gradients and parameters.",
        run=_run,
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
        show=_show,
        columns={"remedy": "string"},
        examples=("remedy init:tiny-bert --remedies stronger_skip,pre_norm --sequences 1 --tokens 16",),
        execution=EXECUTION,
        order=70,
        in_plans=True,
    )
)
