"""Residual branches scaled down with depth."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.branch_grafts import BranchGains
from rankscope.surgery.graft import Spot


@remedy(
    claim="With branches scaled by 1/sqrt(L), the correlation between tokens stays below 1 at any depth, and the "
    "gradients of queries and keys do not vanish at initialisation.",
    claims_tokens=True,
    cites=(Cite("noci2022signal"),),
    needs={"skips"},
    strength=1.0,
    strength_means="c in the factor c / sqrt(L) on every branch",
    neutral=None,
    learnable=True,
    parameters="none; 2 L if learned",
    flops="2 n d L products",
)
def residual_scale(case: RemedyCase) -> Sequence[Step]:
    """Every branch times c/sqrt(L), with L the number of blocks of its stack."""

    def gain(spot: Spot) -> float:
        return float(case.strength / spot.depth**0.5)

    return (BranchGains(case.view, gain, gain, learnable=case.learnable),)
