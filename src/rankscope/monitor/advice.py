"""Which remedies help against an alarm: each is tried on the probe before it is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rankscope.monitor.alarms import AlarmSpec, LayerState
from rankscope.monitor.references import Place
from rankscope.runs.readings import LayerValue

HELPS = 0.5
"""A remedy is named if the alarm's severity under it is at most half of what it is without."""
MOST_NAMED = 2

States = Callable[[Sequence[LayerValue]], Mapping[Place, LayerState]]


@dataclass(frozen=True)
class Advice:
    """What an alarm says about remedies.

    Attributes:
        remedies: names of those that helped, the best first; at most two.
        words: a sentence about what was tried.
    """

    remedies: tuple[str, ...]
    words: str


def advise(
    spec: AlarmSpec,
    stack: str | None,
    plain: Sequence[LayerValue],
    trials: Callable[[], Mapping[str, Sequence[LayerValue]]],
    states: States,
) -> Advice:
    """The remedies under which the probe reads at most half of an alarm's severity.

    Args:
        spec: the alarm.
        stack: where it was raised.
        plain: the probe as it reads without a remedy.
        trials: how it reads under each remedy the model can undergo; asked only where it can say something.
        states: what the rule of an alarm sees of such readings.
    """
    before = _worst(spec, stack, states(plain))
    if before is None:
        return Advice((), "No remedy was tried: a pass of the probe does not show this. Compare them with remedy().")
    tried = {name: _worst(spec, stack, states(values)) for name, values in trials().items()}
    known = {name: after for name, after in tried.items() if after is not None}
    better = [name for name in known if known[name][0] < math.inf and known[name][0] <= HELPS * before[0]]
    better.sort(key=lambda name: known[name][0])
    if not better:
        return Advice((), f"None of the {len(known)} remedies tried on the probe helps." if known else
                      "No remedy could be tried on this model.")  # fmt: skip
    what = spec.metrics[0].replace("_", " ")
    named = [f"{name} brings the {what} to {known[name][1]:.2g}" for name in better[:MOST_NAMED]]
    words = f"Of {len(known)} remedies tried on the probe, on these weights, {' and '.join(named)}."
    return Advice(tuple(better[:MOST_NAMED]), words)


def _worst(spec: AlarmSpec, stack: str | None, states: Mapping[Place, LayerState]) -> tuple[float, float] | None:
    """Severity where it is largest, and what is measured there; None where nothing can be judged."""
    judged = [(spec.rule(state), state) for place, state in states.items() if place[0] == stack]
    known = [(judgement.severity, state.now[spec.metrics[0]]) for judgement, state in judged if judgement is not None]
    return max(known, key=lambda entry: entry[0], default=None)
