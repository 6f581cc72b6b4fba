"""Weights that move faster and faster."""

from __future__ import annotations

import math

from rankscope.monitor.alarms._spec import JUMP, Judgement, LayerState, alarm

FAST = 0.015
"""Change of the weights per step, relative to their norm, below which a faster motion is not a fault."""


@alarm(
    metrics=("weight_motion",),
    title="Weights move faster and faster",
    is_event=True,
    is_note=True,
    peaks=True,
)
def update_growth(layer: LayerState) -> Judgement | None:
    """The weights of a block change four times as much per step as those of any block up to eight readings ago.

    **Heuristic.** Severity is the smaller of a quarter of that ratio and of the change divided by 0.015 of the norm,
    so that a rate that returns to a usual value is not reported. A warm-up that is linear at most doubles it, and a
    block that is unfrozen moves as the others do.
    """
    peak = layer.peak.get("weight_motion", math.nan)
    if not layer.has("weight_motion") or not peak > 0.0:
        return None
    now = layer.now["weight_motion"]
    return Judgement(
        severity=min(now / (JUMP * peak), now / FAST),
        evidence={"weight_motion": now, "largest_before": peak},
        words=f"weights change by {now:.2g} of their norm per step, at most {peak:.2g} until eight readings ago",
    )
