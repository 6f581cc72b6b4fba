"""Gradients that are not cleared between two steps."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm

CARRIED = 0.03
"""Share of a gradient that was that of the step before."""


@alarm(metrics=("gradient_carried",), title="Gradients are not cleared")
def kept_gradients(layer: LayerState) -> Judgement | None:
    """The gradient of a step is a sum of what backward added and of the one before, by 3% or more.

    **Exact** for one small parameter and the step after a reading; gradients that are accumulated over several
    backward passes of one step are not kept ones. Not judged with several processes or a compiled model.
    """
    if not layer.has("gradient_carried"):
        return None
    share = layer.now["gradient_carried"]
    words = f"{share:.0%} of a gradient is the one before it"
    if share == 1.0:
        words = f"{words}: the optimizer makes two steps for one backward pass"
    return Judgement(share / CARRIED, {"gradient_carried": share}, words, "gradients")
