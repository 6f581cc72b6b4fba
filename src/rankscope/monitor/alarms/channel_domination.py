"""One channel outweighs all others."""

from __future__ import annotations

import math

from rankscope._citations import Cite
from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm, share_above

LIMIT = 0.5
GROWTH = 2.0
"""As for a dominating token."""


@alarm(
    metrics=("largest_channel_share",),
    title="One channel dominates",
    release=0.8,
    cites=(Cite("kovaleva2021bert"),),
)
def channel_domination(layer: LayerState) -> Judgement | None:
    """The largest channel holds half of the energy beyond chance, and twice its share at the start of the run.

    **Heuristic.** Severity is min((s - null) / (0.5 (1 - null)), s / (2 start)).
    """
    if not layer.has("largest_channel_share"):
        return None
    now = layer.now["largest_channel_share"]
    start, null = layer.start.get("largest_channel_share", math.nan), layer.null.get("largest_channel_share", math.nan)
    grown = now / (GROWTH * start) if start > 0.0 else 0.0
    return Judgement(
        severity=min(share_above(now, null, LIMIT), grown),
        evidence={"largest_channel_share": now, "at_start": start, "random_tokens": null},
        words=f"the largest channel holds {now:.0%} of the energy (start of the run {start:.0%}, random tokens "
        f"{null:.0%})",
    )
