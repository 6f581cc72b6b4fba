"""Attention without its mean."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.attention_grafts import AttentionMixing
from rankscope.surgery.graft import Mixture


@remedy(
    claim="Subtracting the uniform matrix from attention, so that rows sum to 0, removes the direction in which "
    "repeated attention makes tokens equal, and with it most oversmoothing.",
    claims_tokens=True,
    cites=(Cite("ali2023centered"),),
    needs={"attention"},
    strength=1.0,
    strength_means="how much of the uniform matrix is subtracted",
    neutral=0.0,
    learnable=True,
    parameters="none; L if learned",
    flops="a second attention product: 2 n^2 d L",
)
def centred_attention(case: RemedyCase) -> Sequence[Step]:
    """Attention matrices as P - s U, with U uniform over the visible keys."""
    return (
        AttentionMixing(
            case.view,
            {"share": case.strength},
            lambda now: Mixture(uniform=-1.0 * now["share"]),
            learnable=case.learnable,
        ),
    )
