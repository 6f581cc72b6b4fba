"""Two points sent round a circle by one attention layer, again and again."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope._deferred import deferred
from rankscope.papers._recipe import RECIPES, Recipe

RECIPES.add(
    "dong2021-circle",
    Recipe(
        name="dong2021-circle",
        title="One attention layer, again and again, loses the circle",
        cites=(Cite("dong2021attention", "sec. 4.3"),),
        paper=(
            "A single block with two heads is trained to send two opposing points of a circle one step further, and is "
            "then applied to its own output. Without skip and MLP the two trajectories meet; with either of them they "
            "do not, or later; a wider block takes longer."
        ),
        measure=deferred("papers.dong2021.circle:measure_circle"),
        draw=deferred("papers.dong2021.circle_figure:draw_circle"),
        describe=deferred("papers.dong2021.circle_text:describe_circle"),
        conclude=deferred("papers.dong2021.circle_text:conclude_circle"),
        minutes=3,
    ),
)
