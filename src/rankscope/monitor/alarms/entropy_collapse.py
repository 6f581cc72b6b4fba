"""Attention that picks single keys, or all alike."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm, fallen
from rankscope.verdicts.states import ONE_HOT_ENTROPY, UNIFORM_ENTROPY


@alarm(
    metrics=("attention_entropy",),
    title="Attention is one-hot or uniform",
    cites=(Cite("zhai2023stabilizing"),),
    is_note=True,
)
def entropy_collapse(layer: LayerState) -> Judgement | None:
    """The mean attention entropy of a layer is that of one-hot or uniform attention, as ``measure`` would say.

    **Heuristic**: 0.02 and 0.999 of the largest possible. Attention that copies a token is one-hot in healthy models,
    and small initial weights make it uniform for a while, so that this is written down, once it lasts, and raises no
    alarm.
    """
    if not layer.has("attention_entropy"):
        return None
    now = layer.now["attention_entropy"]
    severity = fallen(now, ONE_HOT_ENTROPY)
    kind = "one-hot" if severity >= 1.0 else "uniform" if now >= UNIFORM_ENTROPY else "neither"
    words = f"attention is {kind}, its entropy is {now:.3g} of the largest possible"
    is_uniform = kind == "uniform"
    return Judgement(1.0 if is_uniform else severity, {"attention_entropy": now}, words, may_pass=is_uniform)
