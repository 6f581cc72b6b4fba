"""All tokens of a sequence become one vector."""

from __future__ import annotations

import math

from rankscope._citations import Cite
from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm, fallen

OF_NULL = 0.03
"""Of what random tokens read: below it a thousandth of the energy is left to tell tokens apart. A healthy training may
pass through 0.11 in its first steps (24 layers with skips, five seeds), so that a tenth would leave no margin."""

OF_START = 0.1
OF_NULL_WITH_START = 0.5
"""A fall to a tenth of the run's own start counts once a common vector holds three quarters of the energy."""


@alarm(
    metrics=("relative_residual",),
    title="Tokens collapse",
    cites=(Cite("dong2021attention"),),
)
def token_collapse(layer: LayerState) -> Judgement | None:
    """The relative residual has fallen far below random tokens, or far below the run's own start.

    **Heuristic.** Severity is the larger of 0.03 null / r and min(0.1 start / r, 0.5 null / r).
    """
    if not layer.has("relative_residual"):
        return None
    now = layer.now["relative_residual"]
    start, null = layer.start.get("relative_residual", math.nan), layer.null.get("relative_residual", math.nan)
    since_start = min(fallen(now, start, OF_START), fallen(now, null, OF_NULL_WITH_START))
    return Judgement(
        severity=max(fallen(now, null, OF_NULL), since_start),
        evidence={"relative_residual": now, "at_start": start, "random_tokens": null},
        words=f"relative residual {now:.2g} (start of the run {start:.2g}, random tokens {null:.2g})",
    )
