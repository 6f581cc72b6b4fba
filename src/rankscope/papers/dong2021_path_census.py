"""Numbers and lengths of the paths through well-known transformers."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope._deferred import deferred
from rankscope.papers._recipe import RECIPES, Recipe

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
        measure=deferred("papers.dong2021.census:measure_census"),
        draw=deferred("papers.dong2021.census:draw_census"),
        describe=deferred("papers.dong2021.census:describe_census"),
        conclude=deferred("papers.dong2021.census:conclude_census"),
    ),
)
