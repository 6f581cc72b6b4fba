"""A loss that jumps up and stays there."""

from __future__ import annotations

import math

from rankscope.monitor.alarms._spec import CONVERGED, Judgement, LayerState, alarm

RISE = 0.08
"""Share of the loss before, by which it has to rise."""
SPREADS = 2.0
"""Standard deviations of the loss of single steps, by which the median of eight has to rise."""


LASTS = 4
"""Steps in a row for which it has to have risen; the gauge is shown the loss of every step, whether it reads or not."""


def rise(now: float, level: float, spread: float) -> float:
    """How far a loss rose, or changed its sign, in units of what is a jump."""
    limit = max(RISE * abs(level), SPREADS * spread)
    # A change of sign is a jump as well, unless the loss goes through zero slowly.
    flipped = now < 0.0 < level and level - now > max(level, 10.0 * spread)
    distance = level - now if flipped else max(0.0, now - level)
    return distance / limit if limit > 0.0 else 0.0 if distance == 0.0 else math.inf


@alarm(
    metrics=("loss_now", "loss_level", "loss_spread"), title="The loss jumps", confirm=1, is_event=True, is_note=True
)
def loss_shift(layer: LayerState) -> Judgement | None:
    """The loss is above the range of the steps before, for four steps in a row since the last reading.

    **Heuristic.** Severity is the rise of the median of eight steps above the median of sixteen steps before the last
    sixteen, or that of the least of four steps above the largest of the 32 before, divided by the larger of 8% of the
    level before and two standard deviations of the loss of a step. A loss that falls below zero counts alike if it fell
    by more than its level. A loss that is below a quarter of that of the first readings after its jump is none.
    """
    if not layer.has("loss_now", "loss_level", "loss_spread"):
        return None
    now, level, spread = (layer.now[name] for name in ("loss_now", "loss_level", "loss_spread"))
    evidence = {"loss_now": now, "loss_level": level, "loss_spread": spread}
    severity = 0.0 if 0.0 <= now <= CONVERGED * layer.start.get("loss", 0.0) else rise(now, level, spread)
    return Judgement(severity, evidence, f"loss {now:.3g} for four steps or more, {level:.3g} before")
