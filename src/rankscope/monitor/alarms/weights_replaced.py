"""Weights that something else than the optimizer wrote."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm


@alarm(
    metrics=("weights_written", "weights_undone"),
    title="Weights are written between steps",
    confirm=1,
    is_event=True,
    needs_loss=True,
)
def weights_replaced(layer: LayerState) -> Judgement | None:
    """A parameter was written between two steps of the optimizer: far, or back to where the training was.

    **Exact** for a sample of the entries; see :class:`rankscope.monitor.writes.Writes`. An adapter that is merged, a
    matrix that is pruned and weights that are averaged are written as well, so that it is an alarm only if the loss
    has stayed above its past ever since.
    """
    found = {name: layer.now[name] for name in _WORDS if layer.has(name)}
    if not found:
        return None
    name = max(found, key=lambda name: found[name])
    return Judgement(found[name], {name: found[name]}, _WORDS[name].format(found[name]))


_WORDS = {
    "weights_written": "written {:.2g} times as far as steps and earlier writes explain",
    "weights_undone": "written back {:.2g} times as often as may happen",
}
