"""Five networks under four masks, in both float formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rankscope._citations import Cite
from rankscope.experiments._recipe import RECIPES, Recipe, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.results.run import Run


def _measure(settings: Settings) -> Run:
    from rankscope.experiments.wu2024.measuring import measure_figure

    return measure_figure(settings)


def _draw(run: Run) -> Mapping[str, Figure]:
    from rankscope.experiments.wu2024.figure import draw_figure

    return draw_figure(run)


def _describe(run: Run) -> str:
    from rankscope.experiments.wu2024.text import describe_figure

    return describe_figure(run)


def _conclude(run: Run) -> str:
    from rankscope.experiments.wu2024.text import conclude_figure

    return conclude_figure(run)


RECIPES.add(
    "wu2024-fig2",
    Recipe(
        name="wu2024-fig2",
        title="Masks slow collapse down; does LayerNorm stop it?",
        cites=(Cite("wu2024role", "fig. 2"),),
        paper=(
            "In BERT-base, mu(X) falls exponentially for pure attention under every mask, at different rates. "
            "Adding LayerNorm "
            "alone keeps it from going to zero at random initialisation; in the trained model it takes "
            "LayerNorm together with "
            "the other components."
        ),
        measure=_measure,
        draw=_draw,
        describe=_describe,
        conclude=_conclude,
        checkpoints=("bert",),
        minutes=30,
    ),
)
