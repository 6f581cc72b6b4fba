"""One token outweighs all others."""

from __future__ import annotations

import math

from rankscope._citations import Cite
from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm, share_above
from rankscope.verdicts.states import DOMINANT_SHARE

LIMIT = DOMINANT_SHARE
"""Fraction of the way from chance to everything: the token then outweighs all others together."""

GROWTH = 2.0
"""Relative to the run's own start: a massive token that was there from the start is not reported."""


@alarm(
    metrics=("largest_token_share",),
    title="One token dominates",
    release=0.8,
    cites=(Cite("sun2024massive"), Cite("xiao2024efficient")),
)
def sink_domination(layer: LayerState) -> Judgement | None:
    """The largest token holds half of the energy beyond chance, and twice its share at the start of the run.

    **Heuristic.** Severity is min((s - null) / (0.5 (1 - null)), s / (2 start)).
    """
    if not layer.has("largest_token_share"):
        return None
    now = layer.now["largest_token_share"]
    start, null = layer.start.get("largest_token_share", math.nan), layer.null.get("largest_token_share", math.nan)
    grown = now / (GROWTH * start) if start > 0.0 else 0.0
    return Judgement(
        severity=min(share_above(now, null, LIMIT), grown),
        evidence={"largest_token_share": now, "at_start": start, "random_tokens": null},
        words=f"the largest token holds {now:.0%} of the energy (start of the run {start:.0%}, random tokens "
        f"{null:.0%})",
    )
