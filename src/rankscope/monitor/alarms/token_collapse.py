"""All tokens of a sequence become one vector."""

from __future__ import annotations

import math

from rankscope._citations import Cite
from rankscope.monitor.alarms._spec import DEEP, Judgement, LayerState, alarm, fallen
from rankscope.verdicts.states import COLLAPSED_RESIDUAL, DOMINANT_SHARE

INPUTS_APART = 0.1
"""Relative residual between inputs, above which tokens that agree at a low loss are not a fault."""


@alarm(
    metrics=("relative_residual",),
    title="Tokens collapse",
    cites=(Cite("dong2021attention"),),
)
def token_collapse(layer: LayerState) -> Judgement | None:
    """The tokens have collapsed as ``measure`` would say.

    **Heuristic.** Severity is 0.03 / r, the threshold of every verb
    (:data:`rankscope.verdicts.states.COLLAPSED_RESIDUAL`). Healthy trainings pass through mild collapses in their first
    steps, so that a severity below 8 has to last, unless the gradients have vanished.
    """
    if {"relative_residual", "largest_token_share"} <= layer.undefined:
        # Only a zero stream has no largest token.
        return Judgement(math.inf, {"relative_residual": math.nan}, "the stream is exactly zero")
    if not layer.has("relative_residual"):
        return None
    now, start = layer.now["relative_residual"], layer.start.get("relative_residual", math.nan)
    # As in a verdict, a residual that one constant channel makes small is a collapse only if typical pairs agree.
    apart = max(now, layer.now.get("typical_residual", now))
    unsure = not layer.has("typical_residual") and layer.now.get("largest_channel_share", 0.0) > DOMINANT_SHARE
    caution = "; one channel dominates: add typical_residual to the metrics to see the others" if unsure else ""
    severity = fallen(apart, COLLAPSED_RESIDUAL)
    if layer.converged and layer.now.get("inputs_relative_residual", 0.0) >= INPUTS_APART:
        severity = 0.0  # a classifier that pools its tokens: they agree with each other, and inputs do not
    return Judgement(
        severity=severity,
        evidence={"relative_residual": now, "at_start": start},
        words=f"relative residual {now:.2g} (start of the run {start:.2g}){caution}",
        may_pass=severity < DEEP and (layer.converged or not layer.settled),
    )
