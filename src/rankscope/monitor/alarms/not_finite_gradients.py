"""Gradients that stay NaN or infinite."""

from __future__ import annotations

import math

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm


@alarm(
    metrics=("gradients_not_finite",),
    title="Gradients are NaN or infinite",
    confirm=3,
    to_do="If a loss scaler skips these steps, nothing is learned: look at its scale.",
)
def not_finite_gradients(layer: LayerState) -> Judgement | None:
    """Gradients are not finite in three readings in a row, while weights still are.

    **Exact.** One such step is normal with a loss scaler, which skips it and lowers its scale. If the optimizer used
    the gradients, the weights are no longer finite, which is an alarm of its own.
    """
    if not layer.has("gradients_not_finite"):
        return None
    number = layer.now["gradients_not_finite"]
    words = f"gradients of {number:.0f} parameters are not finite" if number else "gradients are finite"
    return Judgement(math.inf if number else 0.0, {"gradients_not_finite": number}, words, "gradients")
