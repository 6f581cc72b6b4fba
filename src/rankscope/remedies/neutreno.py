"""Attention pulled back to the values of the first block."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.attention_grafts import ValueAnchor


@remedy(
    claim="Attention minimises a smoothness functional, which makes tokens similar. A fidelity term, which adds a "
    "fraction of the difference between the first layer's values and the current ones, reduces this.",
    claims_tokens=True,
    cites=(Cite("nguyen2023mitigating"),),
    needs={"attention"},
    strength=0.6,
    strength_means="lambda, the share of the difference that is added",
    neutral=0.0,
    learnable=True,
    parameters="none; L if learned",
    flops="2 n d L products",
)
def neutreno(case: RemedyCase) -> Sequence[Step]:
    """Attention's output plus lambda (V_1 - V_l), with V_1 the first block's values (NeuTRENO)."""
    return (ValueAnchor(case.view, case.strength, learnable=case.learnable),)
