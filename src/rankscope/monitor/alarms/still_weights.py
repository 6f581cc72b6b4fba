"""Weights that do not move."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm

MOVED = 0.05
"""Share of the entries of the blocks' matrices below which weights count as still."""
STOPPED = 0.75
"""Share of the weights that ever moved, which stop requiring gradients between two readings: a schedule that freezes
blocks freezes fewer at once, and a training in two stages builds another optimizer."""
STEPS = 16
"""Steps without motion that are an alarm: a warm-up from zero and the steps that a loss scaler skips are fewer."""


@alarm(metrics=("still_steps",), title="Weights do not move", confirm=1)
def still_weights(layer: LayerState) -> Judgement | None:
    """Fewer than 5% of the weights that should learn changed at all over sixteen steps, or all of them hardly did.

    **Exact** for a sample of the entries of each parameter that requires a gradient. Weights hardly move if their
    motion per step and learning rate fell to a hundredth while the norm of the gradient did not fall to a fifth; if
    the optimizer's epsilon is a hundred times the root of its second moment and the motion a hundredth of the learning
    rate; if the gradient is exactly zero and was as large as usual before; or if it was never above 3e-7 of their norm
    per step. Weights that stop requiring gradients count if they are three quarters of all that ever moved, stop
    between two readings and stay in the optimizer.
    """
    if not layer.has("still_steps", "weights_moved"):
        return None
    steps, moved = layer.now["still_steps"], layer.now["weights_moved"]
    if (stopped := layer.now.get("weights_stopped", 0.0)) >= STOPPED:
        words = f"{stopped:.0%} of the weights that moved stopped at once, {steps:.0f} steps ago"
        return Judgement(steps / STEPS, {"still_steps": steps, "weights_stopped": stopped}, words)
    if layer.has("weights_slowed", "weights_speed") and moved >= MOVED:
        if layer.now.get("total_gradient_norm") == 0.0:
            words = f"the gradient of every parameter is exactly zero, for {steps:.0f} steps"
            return Judgement(steps / STEPS, {"still_steps": steps, "total_gradient_norm": 0.0}, words)
        words = f"weights hardly move, by {layer.now['weights_speed']:.2g} of their norm per step for {steps:.0f} steps"
        return Judgement(steps / STEPS, {"still_steps": steps, "weights_speed": layer.now["weights_speed"]}, words)
    words = f"{moved:.1%} of the weights changed since the last reading, and hardly any for {steps:.0f} steps"
    return Judgement(steps / STEPS, {"still_steps": steps, "weights_moved": moved}, words)
