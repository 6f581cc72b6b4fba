"""Which designs train, over depth, width, heads and skip gain, against what is predicted before training."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope._deferred import deferred
from rankscope.papers._recipe import RECIPES, Recipe

RECIPES.add(
    "width-depth",
    Recipe(
        name="width-depth",
        title="Does the prediction at initialisation tell which corner trains?",
        cites=(Cite("dong2021attention"),),
        paper=(
            "Attention pulls tokens together, skips and MLPs hold them apart; what this tug-of-war means for the "
            "choice of width and depth is left open."
        ),
        measure=deferred("papers.trainability.measuring:measure_map"),
        draw=deferred("papers.trainability.figure:draw_map"),
        describe=deferred("papers.trainability.text:describe_map"),
        conclude=deferred("papers.trainability.text:conclude_map"),
        minutes=12,
    ),
)
