"""Weights that something else than the optimizer wrote."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm

TURN = 0.3
"""One minus the cosine between the matrices of a block at two readings."""
GROWTH = 5.0
"""Times the largest turn of that block before."""


@alarm(
    metrics=("weight_turn", "weight_turn_before"), title="The weights of a block turn at once", confirm=1, is_event=True
)
def weights_replaced(layer: LayerState) -> Judgement | None:
    """The matrices of a block point elsewhere than at the last reading, five times as far as ever before.

    **Heuristic.** With t one minus the cosine of the two, severity is min(t / 0.3, t / (5 largest before)).
    """
    if not layer.has("weight_turn", "weight_turn_before"):
        return None
    now, before = layer.now["weight_turn"], layer.now["weight_turn_before"]
    severity = min(now / TURN, now / (GROWTH * before) if before > 0.0 else now / TURN)
    words = f"1 - cosine with the last reading {now:.2g}, at most {before:.2g} before"
    return Judgement(max(0.0, severity), {"weight_turn": now, "weight_turn_before": before}, words)
