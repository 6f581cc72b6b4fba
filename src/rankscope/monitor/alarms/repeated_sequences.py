"""A batch of copies."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm

STUCK = 3
"""Readings whose batch equals the one before."""
SORTED = 6
"""Batches in a row that have a single class each."""


@alarm(
    metrics=("batch_copies", "batch_stuck"),
    title="The batch repeats itself",
    to_do="Look at the sampler and at what collates a batch.",
)
def repeated_sequences(layer: LayerState) -> Judgement | None:
    """All sequences of the batch are the same, or all batches are.

    **Exact.** The batch has to be the same in four readings in a row, after eight in which
    it was not; a run that has a single batch from the start is not reported. Also if nine tenths of each of six batches
    in a row have one label, and not the same one in all; and if 99.9% of the squared size of the inputs are one feature
    whose standard deviation is at most a twentieth of its mean.
    """
    if (batches := layer.now.get("batch_one_class", 0.0)) >= SORTED:
        words = f"each of {batches:.0f} batches in a row has a single class"
        return Judgement(batches / SORTED, {"batch_one_class": batches}, words, "data")
    if (feature := layer.now.get("batch_feature", -1.0)) >= 0.0:
        words = f"feature {feature:.0f} has 99.9% of the size of the inputs, and is nearly constant"
        return Judgement(2.0, {"batch_feature": feature}, words, "data")
    if layer.now.get("batch_stuck", 0.0) >= STUCK:
        number = layer.now["batch_stuck"]
        words = f"the batch is the same as in each of the {number:.0f} readings before"
        return Judgement(number / STUCK, {"batch_stuck": number}, words, "data")
    if not layer.has("batch_copies"):
        return None
    now = layer.now["batch_copies"]
    words = f"{now:.0%} of the sequences are copies of another one of the batch"
    return Judgement(float(now == 1.0), {"batch_copies": now}, words, "data")
