"""``graph``: what does a mask do to collapse?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rankscope import options
from rankscope.options import Option
from rankscope.runs.showing import Show
from rankscope.verbs._spec import Verb, verb


def _run() -> Callable[..., Any]:
    from rankscope.ext.theory.masks.run import graph

    return graph


def _show() -> Show:
    from rankscope.ext.theory.masks.show import document, plot

    return Show(document=document, plot=plot)


def _compared(api: Any, given: Mapping[str, Any]) -> Any:
    from rankscope.ext.theory.masks.run import compared

    return compared(api, given)


GRAPH = verb(
    Verb(
        name="graph",
        question="What does a mask do to collapse?",
        answer="Reports centre nodes, radius, diameter, second eigenvalue and the layers until tokens agree.",
        run=_run,
        makes_runs=False,
        call=_compared,
        show=_show,
        options=(
            Option(
                name="masks",
                metavar="MASK",
                is_argument=True,
                several="repeated",
                in_python=False,
                help="Mask names, expressions such as 'causal | sink(1)', or graph files.",
            ),
            options.TOKENS.replace(
                noun=None, default=None, minimum=2, help="Sequence length; a graph file has its own."
            ),
            options.SEED.replace(noun=None, help="Seed for the random tokens."),
        ),
        outputs=(options.FIGURE, options.JSON, options.QUIET.replace(help="Print one sentence per mask.")),
        examples=(
            "graph causal 'causal_window(4) | sink(1)' --tokens 32",
            "graph 'window(3)' --tokens 64 --json",
        ),
        order=60,
    )
)
