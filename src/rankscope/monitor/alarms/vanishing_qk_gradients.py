"""Queries and keys stop learning."""

from __future__ import annotations

import math

from rankscope._citations import Cite
from rankscope.monitor.alarms._spec import DEEP, Judgement, LayerState, alarm, fallen

OF_START = 0.02
NOTHING = 1e-7
"""Ratio that rounding alone leaves of gradients that are exactly zero."""
OF_LARGEST = 1e-3
"""Fraction of the ratio in the best layer at the start of the run: gradients have no random baseline."""


@alarm(
    metrics=("qk_to_v_gradient",),
    title="Query and key gradients vanish",
    confirm=3,
    cites=(Cite("noci2022signal"),),
)
def vanishing_qk_gradients(layer: LayerState) -> Judgement | None:
    """Gradients of queries and keys are tiny beside those of values, which is what equal tokens do to them.

    **Heuristic.** Severity is the larger of 0.02 start / q and 0.001 (largest start of any layer) / q, with q the ratio
    of the norms; infinite if q is 0 up to rounding, whatever it was at the start. Gradients of single batches are
    noisy: three readings in a row must agree. Tokens that look alike for a while have such gradients for as long, so
    that a ratio above an eighth of the threshold has to last as a mild collapse does.
    """
    if not layer.has("qk_to_v_gradient"):
        return None
    now, start = layer.now["qk_to_v_gradient"], layer.start.get("qk_to_v_gradient", math.nan)
    largest = layer.largest_at_start.get("qk_to_v_gradient", math.nan)
    none = now < NOTHING and layer.now.get("v_gradient", 0.0) > 0.0
    if layer.converged and not none:
        return None  # at a low loss, what is left of gradients is noise
    severity = math.inf if none else max(fallen(now, start, OF_START), fallen(now, largest, OF_LARGEST))
    return Judgement(
        severity=severity,
        evidence={"qk_to_v_gradient": now, "at_start": start, "largest_at_start": largest},
        words=f"query and key gradients are {now:.2g} of the value gradient (start of the run {start:.2g}, "
        f"best layer then {largest:.2g})",
        may_pass=severity < DEEP and not layer.settled,
    )
