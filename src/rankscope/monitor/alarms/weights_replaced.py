"""Weights that something else than the optimizer wrote."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm


@alarm(metrics=("weight_jump",), title="Weights jump", confirm=1, is_event=True)
def weights_replaced(layer: LayerState) -> Judgement | None:
    """A parameter moved by a tenth of its norm since the last reading, four times as fast as it ever did.

    **Heuristic.** With d its change relative to its norm, severity is min(d / 0.1, r / 4), with r the motion per step
    over the largest before, and the same relative to the learning rate. A gradient larger than ever before allows a
    larger step in proportion.
    """
    if not layer.has("weight_jump"):
        return None
    now = layer.now["weight_jump"]
    words = f"{now:.2g} times as far as a step of the optimizer could explain"
    return Judgement(now, {"weight_jump": now}, words)
