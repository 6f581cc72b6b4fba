"""Can training make long paths carry the signal?"""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope._deferred import deferred
from rankscope.papers._recipe import RECIPES, Recipe

RECIPES.add(
    "long-paths",
    Recipe(
        name="long-paths",
        title="Can a network be made to use its long paths?",
        cites=(Cite("dong2021attention", "sec. 5"),),
        paper=(
            "Networks with skips work like ensembles of shallow ones: short paths carry the signal. The authors leave "
            "open whether a network can be made to use its long paths."
        ),
        measure=deferred("papers.dong2021.long_paths:measure_long_paths"),
        draw=deferred("papers.dong2021.long_paths_figure:draw_long_paths"),
        describe=deferred("papers.dong2021.long_paths_text:describe_long_paths"),
        conclude=deferred("papers.dong2021.long_paths_text:conclude_long_paths"),
        minutes=10,
    ),
)
