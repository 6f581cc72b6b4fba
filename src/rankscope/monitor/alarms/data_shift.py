"""Batches that are not like those before."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm, largest_change

LIMIT = 3.0
"""Times the largest change that the same value made before: batches are independent draws, so that the largest of many
is seldom exceeded by far, and two in a row seldom at all."""
WATCHED = ("batch_surprise", "batch_padding", "batch_size", "batch_order", "batch_labels")


@alarm(
    metrics=WATCHED,
    title="The data change",
    confirm=1,
    to_do="If the source was not switched on purpose, look at the tokenizer, the normalisation and the masks.",
    is_event=True,
    jumps=True,
)
def data_shift(layer: LayerState) -> Judgement | None:
    """Tokens, their order or the labels are more surprising in two batches in a row than ever, or more are padding.

    **Heuristic.** Severity is a third of the score of :class:`rankscope.monitor.changes.Series`.
    """
    return largest_change(layer, WATCHED, LIMIT)
