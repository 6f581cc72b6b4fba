"""Weights that something else than the optimizer wrote."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm


@alarm(metrics=("weight_jump",), title="Weights jump", confirm=1, is_event=True)
def weights_replaced(layer: LayerState) -> Judgement | None:
    """A parameter moved by a tenth of its norm since the last reading, four times as fast as it ever did.

    **Heuristic.** With d its change relative to its norm, severity is min(d / 0.1, r / 4), with r the motion per step
    over the largest before, and the same relative to the learning rate. A gradient larger than ever before allows a
    larger step in proportion. If the optimizers are known, also if a parameter was written between two of their steps
    (:class:`rankscope.monitor.writes.Writes`): far, or back to where the training was.
    """
    found = {name: layer.now[name] for name in _WORDS if layer.has(name)}
    if not found:
        return None
    name = max(found, key=lambda name: found[name])
    return Judgement(found[name], {name: found[name]}, _WORDS[name].format(found[name]))


_WORDS = {
    "weight_jump": "{:.2g} times as far as a step of the optimizer could explain",
    "weights_written": "written between two steps of the optimizer, {:.2g} times as far as steps and earlier writes "
    "explain",
    "weights_undone": "written back between two steps of the optimizer, {:.2g} times as often as may happen",
}
