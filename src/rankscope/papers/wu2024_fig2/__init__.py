"""Five networks under four masks, in float32 and float64."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.papers._spec import declare

declare(
    __name__,
    name="wu2024-fig2",
    title="Masks slow collapse down; does LayerNorm stop it?",
    cites=(Cite("wu2024role", "fig. 2"),),
    paper=(
        "In BERT-base, mu(X) falls exponentially for pure attention under every mask, at different rates. Adding "
        "LayerNorm alone keeps it from going to zero at random initialisation; in the trained model it takes LayerNorm "
        "together with the other components."
    ),
    checkpoints=("bert",),
    minutes=42,
)
