"""A gate on the output of attention."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.attention_grafts import OutputGate


@remedy(
    claim="A sigmoid gate per head and channel after attention, computed from the layer's input, makes the map from "
    "values to output nonlinear and sparse, stabilises training and removes attention sinks.",
    claims_tokens=False,
    cites=(Cite("qiu2025gated"),),
    needs={"attention", "training"},
    strength=1.0,
    strength_means="standard deviation of the gate's logits for an input of unit variance",
    neutral=None,
    learnable=True,
    parameters="d^2 L (random, created when the model first runs)",
    flops="n d^2 L products",
)
def gated_attention(case: RemedyCase) -> Sequence[Step]:
    """Attention's output times sigmoid(X W), with X the input of attention and W new weights."""
    return (OutputGate(case.strength),)
