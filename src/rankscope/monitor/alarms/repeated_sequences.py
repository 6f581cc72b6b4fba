"""A batch of copies."""

from __future__ import annotations

import math

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm

GROWTH = 0.5
"""Share of the sequences that were different at the start of the run and are copies now."""


@alarm(
    metrics=("batch_copies",),
    title="The batch repeats itself",
    to_do="Look at the sampler and at what collates a batch.",
)
def repeated_sequences(layer: LayerState) -> Judgement | None:
    """All sequences of the batch are the same, or half of those that were different at the start are copies now.

    **Exact.** Two views of each input, or several answers to one prompt, are copies from the start and not reported,
    unless nothing else is in the batch.
    """
    if not layer.has("batch_copies"):
        return None
    now, start = layer.now["batch_copies"], layer.start.get("batch_copies", math.nan)
    grown = (now - start) / ((1.0 - start) * GROWTH) if start < 1.0 else 0.0
    return Judgement(
        severity=max(now if now == 1.0 else 0.0, grown),
        evidence={"batch_copies": now, "at_start": start},
        words=f"{now:.0%} of the sequences are copies of another one of the batch (start of the run {start:.0%})",
    )
