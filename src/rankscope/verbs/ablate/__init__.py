"""``ablate``: which component prevents collapse?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankscope import options
from rankscope.execution.support import ExecutionSupport
from rankscope.options import Option
from rankscope.runs.showing import Show
from rankscope.verbs._spec import Verb, verb

EXECUTION = ExecutionSupport("ablate")

OWN = (
    Option(
        name="variants",
        several="names",
        in_plans=True,
        help="Variants to compare, separated by commas; see `ls variants`.",
    ),
    Option(
        name="masks",
        several="expressions",
        in_plans=True,
        help="Masks, separated by commas: own, or expressions such as 'causal' or 'window(1)'.",
    ),
    options.METRICS,
    Option(
        name="weights",
        choices=("given", "init", "both"),
        default="given",
        in_plans=True,
        help="Use the given weights, a random initialisation, or both.",
    ),
)


def _run() -> Callable[..., Any]:
    from rankscope.verbs.ablate.run import ablate

    return ablate


def _show() -> Show:
    from rankscope.verbs.ablate.show import document, plot

    return Show(document=document, plot=plot, has_choices=True)


ABLATE = verb(
    Verb(
        name="ablate",
        question="Which component prevents collapse?",
        answer="Compares attention alone, with norms, with skips, with MLPs, and the full model.",
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
        columns={"variant": "string", "mask": "string", "weights": "string"},
        examples=(
            "ablate init:tiny-bert --sequences 4 --tokens 32",
            "ablate init:tiny-bert --masks 'own,causal,window(1)' --variants pure,+norm,full --quiet",
        ),
        under_torchrun="torchrun --nproc-per-node 2 -m rankscope ablate init:tiny-llama --tokens 16 --batch 2",
        execution=EXECUTION,
        order=20,
        in_plans=True,
    )
)
