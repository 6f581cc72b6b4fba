"""The declaration of an alarm, and the decorator that registers one. This file does not import torch.

An alarm is a fact (what holds in every correct step does not hold) or a state (absolute, from the one table of
verdicts); ``loss_rises`` is the only one that compares with the past of a run. An event is no alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from rankscope._citations import Cite
from rankscope._printing import brief
from rankscope._registry import Registry


@dataclass(frozen=True)
class LayerState:
    """What an alarm is asked about: one layer at one reading.

    Facts about the whole model and about the batch are in a state of their own.

    Attributes:
        now: means over the probe, by metric.
        first: the values of the first readings of the run.
        undefined: metrics that were measured now but have no value in most sequences.
        settled: whether the gradient of the whole model has nearly vanished since the start, so that training does not
            lead out of this state again.
        converged: whether the loss has fallen to a quarter of its start or less: what tokens or gradients look like
            then is what the objective asked for.
    """

    now: Mapping[str, float]
    first: Mapping[str, Sequence[float]] = field(default_factory=dict)
    undefined: frozenset[str] = frozenset()
    settled: bool = False
    converged: bool = False

    def has(self, *metrics: str) -> bool:
        """Whether all of these were measured now, with a finite value."""
        return all(math.isfinite(self.now.get(metric, math.nan)) for metric in metrics)

    def start(self, metric: str) -> float:
        """The median of the first readings, which tolerates one outlier; NaN if there is none."""
        return median(self.first.get(metric) or (math.nan,))


@dataclass(frozen=True)
class Breach:
    """That a fact does not hold at a layer, or that the layer is in a state.

    Attributes:
        evidence: the numbers it is based on, by name.
        words: the same in a few words.
        component: what the fact itself says is wrong, as that of an :class:`~rankscope.monitor.readings.Alarm`;
            ``"unknown"`` for a state, which follows from something else.
        lasting: steps for which it has to last, because healthy runs pass through it.
    """

    evidence: Mapping[str, float]
    words: str
    component: str = "unknown"
    lasting: int = 0


Rule = Callable[[LayerState], "Breach | None"]


@dataclass(frozen=True)
class AlarmSpec:
    """An alarm: one pure function of a layer's state, and what is said.

    Attributes:
        name: the function's name.
        summary: first line of its docstring.
        metrics: the metrics it uses; without any of them, it was not tested.
        title: the beginning of its sentence.
        readings: consecutive readings with a breach before it is raised, and without one before it is cleared.
        cites: its sources.
        to_do: where to look; never a change to make, because none was tried.
        is_event: it tells of a moment, not of a state that lasts, so that it is never reported as over.
        is_note: healthy runs are in this state as well: it is written down and raises no alarm.
        rule: the function.
    """

    name: str
    summary: str
    metrics: tuple[str, ...]
    title: str
    readings: int
    cites: tuple[Cite, ...]
    to_do: str
    is_event: bool
    is_note: bool
    rule: Rule

    __repr__ = brief


ALARMS: Registry[AlarmSpec] = Registry("alarm", __package__)


def alarm(
    *,
    metrics: tuple[str, ...],
    title: str,
    readings: int = 2,
    cites: tuple[Cite, ...] = (),
    to_do: str = "",
    is_event: bool = False,
    is_note: bool = False,
) -> Callable[[Rule], Rule]:
    """Register a rule; see :class:`AlarmSpec`."""

    def register(rule: Rule) -> Rule:
        summary = (rule.__doc__ or "").strip().split("\n", 1)[0]
        facts = (metrics, title, readings, cites, to_do, is_event, is_note)
        ALARMS.add(rule.__name__, AlarmSpec(rule.__name__, summary, *facts, rule))
        return rule

    return register
