"""Small models trained with and without their parts: does training slow collapse down?"""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope._deferred import deferred
from rankscope.papers._recipe import RECIPES, Recipe

RECIPES.add(
    "training-fights-collapse",
    Recipe(
        name="training-fights-collapse",
        title="Does training fight collapse?",
        cites=(Cite("dong2021attention", "sec. 4.1"), Cite("noci2022signal")),
        paper=(
            "Networks from which skips and MLPs were cut collapse doubly exponentially. They were cut after training, "
            "or never trained; had they been trained in that form, collapse would be expected to be slower. At "
            "collapse the gradients of queries and keys vanish, so that nothing could bring attention back."
        ),
        measure=deferred("papers.dynamics.measuring:measure_training"),
        draw=deferred("papers.dynamics.figure:draw_training"),
        describe=deferred("papers.dynamics.text:describe_training"),
        conclude=deferred("papers.dynamics.text:conclude_training"),
        minutes=10,
    ),
)
