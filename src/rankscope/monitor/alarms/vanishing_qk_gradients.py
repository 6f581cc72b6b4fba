"""Queries and keys stop learning."""

from __future__ import annotations

import math

from rankscope._citations import Cite
from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm

NOTHING = 1e-7
"""Ratio that rounding alone leaves of gradients that are exactly zero."""


@alarm(
    metrics=("qk_to_v_gradient",),
    title="Query and key gradients vanish",
    confirm=3,
    cites=(Cite("noci2022signal"),),
)
def vanishing_qk_gradients(layer: LayerState) -> Judgement | None:
    """Queries and keys get no gradient, while values do: equal tokens, one key for each, or scores that are not read.

    **Exact** up to rounding, in three readings in a row.
    """
    if not layer.has("qk_to_v_gradient"):
        return None
    now, start = layer.now["qk_to_v_gradient"], layer.start.get("qk_to_v_gradient", math.nan)
    severity = math.inf if now < NOTHING and layer.now.get("v_gradient", 0.0) > 0.0 else 0.0
    entropy = layer.now.get("attention_entropy", math.nan)
    seen = f", and the entropy of attention {entropy:.2g}" if math.isfinite(entropy) else ""
    return Judgement(
        severity=severity,
        evidence={"qk_to_v_gradient": now, "at_start": start},
        words=f"query and key gradients are {now:.2g} of the value gradient (start of the run {start:.2g}){seen}",
        component="attention",
    )
