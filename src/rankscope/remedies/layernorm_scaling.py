"""Pre-norms scaled down with depth."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.branch_grafts import NormGains


@remedy(
    claim="Scaling the output of the norms of layer l by 1/sqrt(l) keeps the variance of a pre-norm stream from "
    "growing exponentially with depth, so that deep layers still contribute.",
    claims_tokens=False,
    cites=(Cite("sun2025curse"),),
    needs={"pre-norm"},
    strength=1.0,
    strength_means="s in the factor l^(-s/2) on the norms of block l, counted from 1",
    neutral=0.0,
    learnable=False,
    parameters="none",
    flops="2 n d L products",
)
def layernorm_scaling(case: RemedyCase) -> Sequence[Step]:
    """Every norm of block l times 1/sqrt(l)."""
    return (NormGains(lambda spot: (spot.layer + 1) ** (-case.strength / 2)),)
