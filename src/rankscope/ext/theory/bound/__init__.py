"""``bound``: what do the theorems say about these weights?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankscope import options
from rankscope.execution.support import WHOLE_WEIGHTS, ExecutionSupport
from rankscope.options import Option
from rankscope.runs.showing import Show
from rankscope.verbs._spec import Verb, verb

EXECUTION = ExecutionSupport("bound", no_spread=WHOLE_WEIGHTS, in_float64=True)

OWN = (
    Option(
        name="theorems",
        several="names",
        in_plans=True,
        help="Theorems, separated by commas or repeated; see `ls theorems`.",
    ),
)


def _run() -> Callable[..., Any]:
    from rankscope.ext.theory.bound.run import bound

    return bound


def _show() -> Show:
    from rankscope.ext.theory.bound.show import document, plot

    return Show(document=document, plot=plot)


BOUND = verb(
    Verb(
        name="bound",
        question="What do the theorems say about these weights?",
        answer="Checks the hypotheses and compares each bound with the measured value, layer by layer.",
        run=_run,
        options=(
            options.MODEL,
            *options.TEXTS,
            # The theorems concern all tokens that attention reads, so there is no tokens_policy.
            options.SEQUENCES.replace(default=2),
            options.TOKENS.replace(default=64),
            options.BATCH.replace(default=4),
            options.SEED,
            *OWN,
            *options.SURGERY,
            *options.LOADING,
            *options.execution(EXECUTION.no_offload, EXECUTION.no_spread),
        ),
        show=_show,
        columns={"theorem": "string", "scope": "string", "hypothesis": "string"},
        examples=(
            "bound init:tiny-bert --sequences 1 --tokens 16",
            "bound init:tiny-bert --theorems dong_2021_multi_head --sequences 1 --tokens 16 --quiet",
        ),
        execution=EXECUTION,
        order=50,
        in_plans=True,
        under_variants=True,
    )
)
