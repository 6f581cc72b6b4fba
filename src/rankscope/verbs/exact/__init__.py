"""``exact``: how fast does it really collapse?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankscope import options
from rankscope.execution.support import WHOLE_WEIGHTS, ExecutionSupport
from rankscope.options import Option
from rankscope.runs.showing import Show
from rankscope.verbs._spec import Verb, verb

EXECUTION = ExecutionSupport("exact", no_spread=WHOLE_WEIGHTS, in_float64=True)

OWN = (
    Option(
        name="stability",
        kind=bool,
        default=False,
        in_plans=True,
        help="Also compute each block's factor on an infinitesimal residual.",
    ),
    Option(
        name="plain",
        kind=bool,
        default=True,
        in_plans=True,
        help="Also measure in float64 and in the model's own dtype.",
    ),
)


def _run() -> Callable[..., Any]:
    from rankscope.verbs.exact.run import exact

    return exact


def _show() -> Show:
    from rankscope.verbs.exact.show import document, plot

    return Show(document=document, plot=plot)


EXACT = verb(
    Verb(
        name="exact",
        question="How fast does it really collapse?",
        answer="Computes residuals far below the float floor, with order and factor, and compares the cubic law.",
        run=_run,
        options=(
            options.MODEL,
            # Sequences run one at a time, so there is no --batch.
            *(option for option in options.INPUTS if option is not options.BATCH and option is not options.SEQUENCES),
            options.SEQUENCES.replace(default=4),
            *OWN,
            *options.SURGERY,
            *options.LOADING,
            *options.execution(EXECUTION.no_offload, EXECUTION.no_spread),
        ),
        show=_show,
        columns={"arithmetic": "string"},
        examples=(
            "exact init:tiny-bert --skip 0 --sequences 1 --tokens 32",
            "exact init:tiny-bert --skip 0 --mlp drop --norm identity --mask causal --sequences 1 --tokens 16",
        ),
        execution=EXECUTION,
        order=40,
        in_plans=True,
        under_variants=True,
        is_float64=True,
    )
)
