"""Five networks under four masks, in both float formats."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope._deferred import deferred
from rankscope.papers._recipe import RECIPES, Recipe

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
        measure=deferred("papers.wu2024.measuring:measure_figure"),
        draw=deferred("papers.wu2024.figure:draw_figure"),
        describe=deferred("papers.wu2024.text:describe_figure"),
        conclude=deferred("papers.wu2024.text:conclude_figure"),
        checkpoints=("bert",),
        minutes=42,
    ),
)
