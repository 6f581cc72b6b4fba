"""Gradients that are rounded to zero."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm

LOST = 0.5
"""Share of the entries of the gradients. With a loss scale that fits, it is a few in a hundred."""


@alarm(metrics=("gradient_underflow",), title="Gradients underflow", confirm=3)
def gradient_underflow(layer: LayerState) -> Judgement | None:
    """Half of the entries of the gradients are rounded to zero, in three readings in a row.

    **Estimate**; see :func:`rankscope.monitor.underflow.lost_to_underflow` for which zeros count. Not at a loss below a
    quarter of its start, where little is left of gradients.
    """
    if not layer.has("gradient_underflow") or layer.converged:
        return None
    share = layer.now["gradient_underflow"]
    spacing = layer.now.get("gradient_spacing", 0.0)
    words = f"{share:.0%} of the entries of the gradients are rounded to zero"
    words = f"{words}, and the others are small multiples of {spacing:.2g}" if spacing else words
    return Judgement(share / LOST, {"gradient_underflow": share}, words, "gradients")
