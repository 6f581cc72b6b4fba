"""A jump between two readings."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import JUMP, Judgement, LayerState, alarm, largest_change

WATCHED = (
    "relative_residual",
    "stable_rank",
    "largest_channel_share",
    "stream_rms",
    "write_ratio",
    "attention_entropy",
    "inputs_relative_residual",
    "weight_norm",
)


@alarm(
    metrics=WATCHED,
    title="The model changes suddenly",
    confirm=1,
    is_event=True,
    is_note=True,
    jumps=True,
)
def sudden_change(layer: LayerState) -> Judgement | None:
    """A value left its level, in two readings in a row, by four times the largest change of the readings before.

    **Heuristic.** Severity is a quarter of the score of :class:`rankscope.monitor.changes.Series`, the largest over
    metrics. What drifts has a score near 1, however fast it does. Not judged at a low loss, or after the learning rate
    was raised by its schedule; and tokens or inputs that move apart are not a fault.
    """
    if layer.converged or layer.restarted:
        return None
    return largest_change(layer, [name for name in WATCHED if name not in APART or _falls(layer, name)], JUMP)


APART = ("relative_residual", "inputs_relative_residual", "stable_rank")


def _falls(layer: LayerState, name: str) -> bool:
    return name in layer.changes and layer.now.get(name, 0.0) < layer.changes[name].before
