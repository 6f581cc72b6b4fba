"""Residual over depth in BERT, ALBERT and XLNet, with and without skips and MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rankscope._citations import Cite
from rankscope.experiments._recipe import RECIPES, Recipe, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.results.run import Run


def _measure(settings: Settings) -> Run:
    from rankscope.experiments.dong2021.measuring import measure_figure

    return measure_figure(settings)


def _draw(run: Run) -> Mapping[str, Figure]:
    from rankscope.experiments.dong2021.figure import draw_figure

    return draw_figure(run)


def _describe(run: Run) -> str:
    from rankscope.experiments.dong2021.text import describe_figure

    return describe_figure(run)


def _conclude(run: Run) -> str:
    from rankscope.experiments.dong2021.text import conclude_figure

    return conclude_figure(run)


RECIPES.add(
    "dong2021-fig2",
    Recipe(
        name="dong2021-fig2",
        title="Attention alone loses rank; skips keep it (BERT, ALBERT, XLNet)",
        cites=(Cite("dong2021attention", "fig. 2"),),
        paper=(
            "The residual of the tokens, relative to their size, falls to zero within a few blocks when skips "
            "are removed; "
            "MLPs slow the fall a little; skips stop it almost by themselves. Shown for BERT, ALBERT and XLNet "
            "at base size, "
            "at random initialisation and trained, on 32 sequences of 128 tokens."
        ),
        measure=_measure,
        draw=_draw,
        describe=_describe,
        conclude=_conclude,
        checkpoints=("bert", "albert", "xlnet"),
        minutes=40,
    ),
)
