"""Attention centred at the identity."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.attention_grafts import AttentionMixing
from rankscope.surgery.graft import Mixture


@remedy(
    claim="Attention of the form alpha I + beta P - gamma U is close to the identity when queries and keys are small, "
    "which keeps the covariance of tokens from degenerating at any depth.",
    claims_tokens=True,
    cites=(Cite("noci2023shaped"), Cite("he2024simplifying")),
    needs={"attention"},
    strength=1.0,
    strength_means="beta and gamma, the weights of the attention matrix and of the uniform matrix; alpha is 1",
    neutral=None,
    learnable=True,
    parameters="3 L",
    flops="a second attention product: 2 n^2 d L",
)
def shaped_attention(case: RemedyCase) -> Sequence[Step]:
    """Attention matrices as alpha I + beta P - gamma U, with U uniform over the visible keys."""
    start = {"alpha": 1.0, "beta": case.strength, "gamma": case.strength}
    return (
        AttentionMixing(
            case.view,
            start,
            lambda now: Mixture(now["alpha"], now["beta"], -1.0 * now["gamma"]),
            learnable=case.learnable,
        ),
    )
