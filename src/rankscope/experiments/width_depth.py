"""Which designs train, over depth, width, heads and skip gain, against what is predicted before training."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope._deferred import deferred
from rankscope.experiments._recipe import RECIPES, Recipe

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
        measure=deferred("experiments.trainability.measuring:measure_map"),
        draw=deferred("experiments.trainability.figure:draw_map"),
        describe=deferred("experiments.trainability.text:describe_map"),
        conclude=deferred("experiments.trainability.text:conclude_map"),
        minutes=12,
    ),
)
