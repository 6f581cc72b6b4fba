"""A batch of copies."""

from __future__ import annotations

import math

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm

GROWTH = 0.5
"""Share of the sequences that were different at the start of the run and are copies now."""

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
    """All sequences of the batch are the same, half of those that differed at the start are, or all batches are.

    **Exact.** Two views of each input, or several answers to one prompt, are copies from the start and not reported,
    unless nothing else is in the batch. The batch has to be the same in four readings in a row, after eight in which
    it was not; a run that has a single batch from the start is not reported. Also if nine tenths of each of six batches
    in a row have one label, and not the same one in all; and if 99.9% of the squared size of the inputs are one feature
    whose standard deviation is at most a twentieth of its mean.
    """
    if (batches := layer.now.get("batch_one_class", 0.0)) >= SORTED:
        words = f"each of {batches:.0f} batches in a row has a single class"
        return Judgement(batches / SORTED, {"batch_one_class": batches}, words)
    if (feature := layer.now.get("batch_feature", -1.0)) >= 0.0:
        words = f"feature {feature:.0f} has 99.9% of the size of the inputs, and is nearly constant"
        return Judgement(2.0, {"batch_feature": feature}, words)
    if layer.now.get("batch_stuck", 0.0) >= STUCK:
        number = layer.now["batch_stuck"]
        words = f"the batch is the same as in each of the {number:.0f} readings before"
        return Judgement(number / STUCK, {"batch_stuck": number}, words)
    if not layer.has("batch_copies"):
        return None
    now, start = layer.now["batch_copies"], layer.start.get("batch_copies", math.nan)
    grown = (now - start) / ((1.0 - start) * GROWTH) if start < 1.0 else 0.0
    return Judgement(
        severity=max(now if now == 1.0 else 0.0, grown),
        evidence={"batch_copies": now, "at_start": start},
        words=f"{now:.0%} of the sequences are copies of another one of the batch (start of the run {start:.0%})",
    )
