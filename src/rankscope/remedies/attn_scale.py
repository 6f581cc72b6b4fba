"""A larger deviation from uniform attention."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.attention_grafts import AttentionMixing
from rankscope.surgery.graft import Mixture


@remedy(
    claim="Attention is a low-pass filter over tokens. A learned factor on its deviation from the mean lets high "
    "frequencies through and keeps patches different, which improves deep vision transformers.",
    claims_tokens=True,
    cites=(Cite("wang2022antioversmoothing"),),
    needs={"attention", "training"},
    strength=1.0,
    strength_means="omega in the factor 1 + omega on P - U (the paper learns it, from 0)",
    neutral=0.0,
    learnable=True,
    parameters="none; L if learned (the paper: one per head)",
    flops="a second attention product: 2 n^2 d L",
)
def attn_scale(case: RemedyCase) -> Sequence[Step]:
    """Attention matrices as U + (1 + omega)(P - U), with U uniform over the visible keys (AttnScale)."""
    return (
        AttentionMixing(
            case.view,
            {"omega": case.strength},
            lambda now: Mixture(own=1.0 + now["omega"], uniform=-1.0 * now["omega"]),
            learnable=case.learnable,
        ),
    )
