"""Numbers and lengths of the paths through well-known transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rankscope._citations import Cite
from rankscope.experiments._recipe import RECIPES, Recipe, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.results.run import Run


def _measure(settings: Settings) -> Run:
    from rankscope.experiments.dong2021.census import measure_census

    return measure_census(settings)


def _draw(run: Run) -> Mapping[str, Figure]:
    from rankscope.experiments.dong2021.census import draw_census

    return draw_census(run)


def _describe(run: Run) -> str:
    from rankscope.experiments.dong2021.census import describe_census

    return describe_census(run)


def _conclude(run: Run) -> str:
    from rankscope.experiments.dong2021.census import conclude_census

    return conclude_census(run)


RECIPES.add(
    "dong2021-path-census",
    Recipe(
        name="dong2021-path-census",
        title="Most paths through a transformer are long",
        cites=(Cite("dong2021attention", "thm. 2.1"),),
        paper=(
            "A network of L blocks with H heads and skips is a sum over paths; C(L,k) H^k of them enter k "
            "blocks. Long paths "
            "converge to rank one, so the few short ones matter."
        ),
        measure=_measure,
        draw=_draw,
        describe=_describe,
        conclude=_conclude,
    ),
)
