"""The difference of two attention matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._present import refuse_rotary
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.attention_grafts import DifferentialMaps
from rankscope.surgery.graft import Spot


@remedy(
    claim="Subtracting a second softmax from the first cancels common-mode noise, as a differential amplifier does, "
    "so that attention is sparser and focuses on the relevant context.",
    claims_tokens=False,
    cites=(Cite("ye2025differential"),),
    needs={"attention", "training"},
    strength=1.0,
    strength_means="factor on the paper's initial lambda, 0.8 - 0.6 exp(-0.3 (l - 1)) in block l, counted from 1",
    neutral=None,
    learnable=False,
    parameters="none (the paper learns lambda and a norm per head)",
    flops="a second attention product: 2 n^2 d L",
)
def differential_attention(case: RemedyCase) -> Sequence[Step]:
    r"""Attention as P_1 - lambda P_2, from the two halves of every query and key, with a norm on each head.

    This is the paper's block as it is initialised, with no new weights: a head of width d is read as one differential
    head whose queries and keys have d/2 channels, and its output is normed and multiplied by one minus the initial
    lambda. Rotary positions pair channels of the two halves, so models that have them are refused.
    """
    refuse_rotary(
        case.view,
        "their rotation pairs channels of the two halves of a query, so a half by itself has no such positions. "
        "Differential attention has to be built into this model.",
    )

    def initial(spot: Spot) -> float:
        return 0.8 - 0.6 * math.exp(-0.3 * spot.layer)

    return (DifferentialMaps(lambda spot: case.strength * initial(spot), lambda spot: 1.0 - initial(spot)),)
