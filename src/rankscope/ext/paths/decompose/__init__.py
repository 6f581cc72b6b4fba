"""``decompose``: which paths carry the signal?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankscope import options
from rankscope.execution.support import WHOLE_WEIGHTS, ExecutionSupport
from rankscope.options import Option
from rankscope.runs.showing import Show
from rankscope.verbs._spec import Verb, verb

EXECUTION = ExecutionSupport(
    "decompose",
    no_offload="the sums of all path lengths of all sequences would have to be stored between blocks, which takes the "
    "memory of the residual stream times the number of blocks",
    no_spread=WHOLE_WEIGHTS,
    in_float64=True,
)

OWN = (
    Option(
        name="marginals",
        flags=("--through",),
        choices=("heads", "layers"),
        several="repeated",
        default=(),
        in_plans=True,
        help="Also sum all paths through each head or layer; repeatable.",
    ),
    Option(
        name="at_layers",
        flags=("--at-layer",),
        kind=int,
        minimum=0,
        several="repeated",
        default=(),
        in_plans=True,
        help="Also report path lengths after this block; repeatable.",
    ),
    Option(
        name="origins",
        kind=bool,
        default=False,
        in_plans=True,
        help="Report embedding, MLPs and biases separately.",
    ),
    Option(name="token", kind=int, in_plans=True, help="Token id whose logit is decomposed as well."),
    options.METRICS,
)


def _run() -> Callable[..., Any]:
    from rankscope.ext.paths.decompose.run import decompose

    return decompose


def _show() -> Show:
    from rankscope.ext.paths.decompose.show import document, plot

    return Show(document=document, plot=plot)


DECOMPOSE = verb(
    Verb(
        name="decompose",
        question="Which paths carry the signal?",
        answer="Computes the exact sum of all paths of each length, and of those through each head.",
        run=_run,
        options=(
            options.MODEL,
            *options.INPUTS,
            *OWN,
            *options.SURGERY,
            *options.LOADING,
            *options.execution(EXECUTION.no_offload, EXECUTION.no_spread),
        ),
        show=_show,
        columns={"length": "int64", "paths": "string", "origin": "string"},
        examples=(
            "decompose init:tiny-gpt2 --sequences 2 --tokens 16",
            "decompose init:tiny-bert --through heads --sequences 2 --tokens 16 --out paths",
        ),
        execution=EXECUTION,
        order=30,
        in_plans=True,
        under_variants=True,
    )
)
