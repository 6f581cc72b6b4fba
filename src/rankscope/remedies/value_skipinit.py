"""Attention initialised as the identity."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.attention_grafts import AttentionMixing
from rankscope.surgery.graft import Mixture


@remedy(
    claim="Attention of the form alpha I + beta P, initialised with alpha = 1 and beta = 0, leaves tokens unmixed at "
    "initialisation, so that Transformers train without skips.",
    claims_tokens=True,
    cites=(Cite("he2023shortcuts"),),
    needs={"attention", "training"},
    strength=0.0,
    strength_means="beta, the initial weight of the attention matrix; alpha is 1",
    neutral=None,
    learnable=True,
    parameters="2 L",
    flops="2 n d L products",
)
def value_skipinit(case: RemedyCase) -> Sequence[Step]:
    """Attention matrices as alpha I + beta P, initially the identity (Value-SkipInit)."""
    start = {"alpha": 1.0, "beta": case.strength}
    return (
        AttentionMixing(case.view, start, lambda now: Mixture(now["alpha"], now["beta"]), learnable=case.learnable),
    )
