"""Weights that do not move."""

from __future__ import annotations

import math

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm

MOVED = 0.05
"""Share of the entries of the blocks' matrices below which weights count as still."""
STEPS = 16
"""Steps without motion that are an alarm: a warm-up from zero and the steps that a loss scaler skips are fewer."""


@alarm(metrics=("still_steps", "zero_steps"), title="Weights do not move", confirm=1)
def still_weights(layer: LayerState) -> Judgement | None:
    """Fewer than 5% of the weights that should learn changed at all over sixteen steps, or all gradients are zero.

    **Exact** for a sample of the entries of each parameter that requires a gradient. Not reported at a loss below a
    quarter of its start, where training may be done and a margin may be kept by all inputs.
    """
    zero, rate = layer.now.get("zero_steps", 0.0), layer.now.get("learning_rate", math.nan)
    if zero >= STEPS and not layer.converged:
        words = f"the gradient of every parameter is exactly zero, for {zero:.0f} steps"
        return Judgement(zero / STEPS, {"zero_steps": zero}, words, "gradients")
    if not layer.has("still_steps", "weights_moved"):
        return None
    steps, moved = layer.now["still_steps"], layer.now["weights_moved"]
    words = f"{moved:.1%} of the weights changed since the last reading, and hardly any for {steps:.0f} steps"
    component = "numbers" if moved > 0.0 else "optimizer"
    if rate == 0.0:
        words, component = f"{words}; the learning rate is 0", "rate"
    elif layer.now.get("gradient_norm", layer.now.get("blocks_with_gradient", 0.0)) == 0.0:
        words, component = f"{words}; they have no gradient", "gradients"
    elif math.isfinite(rate):
        words = f"{words}; the learning rate is {rate:.2g}"
    return Judgement(
        0.0 if layer.converged else steps / STEPS, {"still_steps": steps, "weights_moved": moved}, words, component
    )
