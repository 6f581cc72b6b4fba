"""Batches that are not like those before."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm, largest_change

LIMIT = 3.0
"""Times the largest change that the same value made before: batches are independent draws, so that the largest of many
is seldom exceeded by far, and two in a row seldom at all."""
CUT = 2.0
"""Length of all earlier sequences relative to that of the last ones."""
WATCHED = ("batch_surprise", "batch_padding", "batch_size", "batch_order", "batch_labels", "batch_columns")


@alarm(
    metrics=WATCHED,
    title="The data change",
    confirm=1,
    is_event=True,
    is_note=True,
    jumps=True,
)
def data_shift(layer: LayerState) -> Judgement | None:
    """Tokens, their order or the labels are more surprising in two batches in a row than ever, or more are padding.

    **Heuristic.** Severity is a third of the score of :class:`rankscope.monitor.changes.Series`. **Exact** for lengths:
    sequences that had one length and now have another, at most half of it, in four readings in a row, without more of
    them in a batch. Lengths that differ from batch to batch, or grow, are never reported.
    """
    if (cut := layer.now.get("batch_cut", 0.0)) >= CUT:
        return Judgement(cut / CUT, {"batch_cut": cut}, f"sequences were {cut:.2g} times as long in the batches before")
    return largest_change(layer, WATCHED, LIMIT)
