"""Weights that do not move."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm

STEPS = 16
"""Steps without motion that are an alarm: a warm-up from zero and the steps that a loss scaler skips are fewer."""


@alarm(metrics=("still_steps",), title="Weights do not move", confirm=1)
def still_weights(layer: LayerState) -> Judgement | None:
    """Fewer than 5% of the weights that should learn changed at all over sixteen steps.

    **Exact** for a sample of the entries of each parameter that requires a gradient.
    """
    if not layer.has("still_steps", "weights_moved"):
        return None
    steps, moved = layer.now["still_steps"], layer.now["weights_moved"]
    words = f"{moved:.1%} of the weights changed since the last reading, and hardly any for {steps:.0f} steps"
    return Judgement(steps / STEPS, {"still_steps": steps, "weights_moved": moved}, words)
