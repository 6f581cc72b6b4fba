"""Values mixed with those of the first block."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.attention_grafts import ValueMixing


@remedy(
    claim="Adding the first layer's values to those of every later layer preserves token-level information that the "
    "residual stream loses, and reaches the same loss with fewer parameters and less data.",
    claims_tokens=False,
    cites=(Cite("zhou2025value"),),
    needs={"attention", "training"},
    strength=0.5,
    strength_means="share of the first block's values",
    neutral=0.0,
    learnable=True,
    parameters="none; L if learned",
    flops="2 n d L products",
)
def value_residual(case: RemedyCase) -> Sequence[Step]:
    """Attention over (1 - lambda) V_l + lambda V_1, with V_1 the first block's values (ResFormer)."""
    return (ValueMixing(case.view, case.strength, learnable=case.learnable),)
