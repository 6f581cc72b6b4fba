"""Attention rows concentrate on single keys."""

from __future__ import annotations

import math

from rankscope._citations import Cite
from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm, fallen

OF_NULL = 0.1
"""Fraction of the entropy of random scores of unit variance."""

OF_START = 0.25
OF_NULL_WITH_START = 0.3
"""A fall to a quarter of the run's own start counts once less than a third of the random entropy is left."""


@alarm(
    metrics=("attention_entropy",),
    title="Attention entropy collapses",
    cites=(Cite("zhai2023stabilizing"),),
    is_note=True,
)
def entropy_collapse(layer: LayerState) -> Judgement | None:
    """The mean attention entropy of a layer has fallen far below random scores, or far below the run's own start.

    **Heuristic.** Severity is the larger of 0.1 null / e and min(0.25 start / e, 0.3 null / e).
    """
    if not layer.has("attention_entropy"):
        return None
    now = layer.now["attention_entropy"]
    start, null = layer.start.get("attention_entropy", math.nan), layer.null.get("attention_entropy", math.nan)
    since_start = min(fallen(now, start, OF_START), fallen(now, null, OF_NULL_WITH_START))
    return Judgement(
        severity=max(fallen(now, null, OF_NULL), since_start),
        evidence={"attention_entropy": now, "at_start": start, "random_scores": null},
        words=f"attention entropy {now:.2g} of the largest possible (start of the run {start:.2g}, "
        f"random scores {null:.2g})",
    )
