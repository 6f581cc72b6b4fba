"""NaN or infinity in the weights, in the stream, or in the loss."""

from __future__ import annotations

import math

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm

WORDS = {
    "weights_not_finite": "weights are not finite",
    "loss_not_finite": "the loss is not finite",
    "not_finite": "the stream is not finite in {:.0%} of the sequences",
    "batch_not_finite": "{:.2g} of the entries of the batch are NaN or infinite",
}


@alarm(
    metrics=tuple(WORDS),
    title="NaN or infinity",
    confirm=1,
)
def not_finite(layer: LayerState) -> Judgement | None:
    """A weight, an activation of the probe, or the loss is NaN or infinite. **Exact**; the first reading counts."""
    known = {name: layer.now[name] for name in WORDS if layer.has(name)}
    if not known and not layer.has("relative_residual"):
        return None
    bad = {name: value for name, value in known.items() if value > 0.0}
    words = [WORDS[name].format(value) for name, value in bad.items()]
    return Judgement(math.inf if bad else 0.0, bad or known, " and ".join(words) or "all numbers are finite")
