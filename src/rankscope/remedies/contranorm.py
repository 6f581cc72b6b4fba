"""Tokens pushed apart after every block."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.branch_grafts import Contrast


@remedy(
    claim="A gradient step on the uniformity loss of contrastive learning, before the norm of each block, makes "
    "tokens less similar and their spectrum flatter, and improves deep models.",
    claims_tokens=True,
    cites=(Cite("guo2023contranorm"),),
    needs={"skips", "attention"},
    strength=0.1,
    strength_means="s in X - s softmax(XX^T) X, rows of unit length inside the softmax",
    neutral=0.0,
    learnable=False,
    parameters="none",
    flops="4 n^2 d L products",
)
def contranorm(case: RemedyCase) -> Sequence[Step]:
    """X - s softmax(X X^T) X after each block, over the tokens visible to attention."""
    return (Contrast(case.strength),)
