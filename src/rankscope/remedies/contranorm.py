"""Tokens pushed apart after every block."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.branch_grafts import Contrast


@remedy(
    claim="A step down the uniformity loss of contrastive learning, before the norm of each block, makes tokens less "
    "alike and their spectrum flatter, and deep models do better.",
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
    """After each block X - s softmax(X X^T) X, over the tokens that attention sees."""
    return (Contrast(case.strength),)
