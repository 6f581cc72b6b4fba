"""All tokens of a sequence become one vector."""

from __future__ import annotations

import math

from rankscope._citations import Cite
from rankscope.monitor.alarms._spec import DEEP, Judgement, LayerState, alarm, fallen
from rankscope.verdicts.states import COLLAPSED_RESIDUAL, DOMINANT_SHARE

OF_START = 0.1
INPUTS_APART = 0.1
"""Relative residual between inputs, above which tokens that agree at a low loss are not a fault."""
OF_NULL_WITH_START = 0.5
"""A fall to a tenth of the run's own start counts once a common vector holds three quarters of the energy."""


@alarm(
    metrics=("relative_residual",),
    title="Tokens collapse",
    cites=(Cite("dong2021attention"),),
)
def token_collapse(layer: LayerState) -> Judgement | None:
    """The tokens have collapsed as ``measure`` would say, or fallen far below the run's own start.

    **Heuristic.** Severity is the larger of 0.03 / r, the threshold of every verb
    (:data:`rankscope.verdicts.states.COLLAPSED_RESIDUAL`), and min(0.1 start / r, 0.5 null / r). Healthy trainings pass
    through 0.07 in their first steps, so that a severity below 8 has to last, unless the gradients
    have vanished.
    """
    if {"relative_residual", "largest_token_share"} <= layer.undefined:
        # Only a zero stream has no largest token.
        return Judgement(math.inf, {"relative_residual": math.nan}, "the stream is exactly zero")
    if not layer.has("relative_residual"):
        return None
    now = layer.now["relative_residual"]
    start, null = layer.start.get("relative_residual", math.nan), layer.null.get("relative_residual", math.nan)
    since_start = min(fallen(now, start, OF_START), fallen(now, null, OF_NULL_WITH_START))
    # As in a verdict, a residual that one constant channel makes small is a collapse only if typical pairs agree.
    apart = max(now, layer.now.get("typical_residual", now))
    unsure = not layer.has("typical_residual") and layer.now.get("largest_channel_share", 0.0) > DOMINANT_SHARE
    caution = "; one channel dominates: add typical_residual to the metrics to see the others" if unsure else ""
    severity = max(fallen(apart, 1.0, COLLAPSED_RESIDUAL), since_start)
    if layer.converged and layer.now.get("inputs_relative_residual", 0.0) >= INPUTS_APART:
        severity = 0.0  # a classifier that pools its tokens: they agree with each other, and inputs do not
    return Judgement(
        severity=severity,
        evidence={"relative_residual": now, "at_start": start, "random_tokens": null},
        words=f"relative residual {now:.2g} (start of the run {start:.2g}, random tokens {null:.2g}){caution}",
        may_pass=severity < DEEP and (layer.converged or not layer.settled),
    )
