"""The declaration of an alarm, and the decorator that registers one. This file does not import torch.

An alarm is a fact (what holds in every correct step does not hold) or a state (absolute, from the one table of
verdicts); ``loss_rises`` is the only one that compares with the past of a run. An event is no alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rankscope._citations import Cite
from rankscope._printing import brief
from rankscope._registry import Registry


@dataclass(frozen=True)
class LayerState:
    """The input of an alarm's rule: one layer now, and at the start of the run.

    Facts about the whole model and about the batch are in a state of their own.

    Attributes:
        now: means over the probe, by metric.
        start: medians over the first readings of the run.
        undefined: metrics that were measured now but have no value in most sequences.
        highest: largest of the first readings of the run, of this layer.
        settled: whether the gradient of the whole model has nearly vanished since the start, so that training does not
            lead out of this state again.
        converged: whether the loss has fallen to a quarter of its start or less: what tokens or gradients look like
            then is what the objective asked for.
    """

    now: Mapping[str, float]
    start: Mapping[str, float] = field(default_factory=dict)
    undefined: frozenset[str] = frozenset()
    highest: Mapping[str, float] = field(default_factory=dict)
    settled: bool = False
    converged: bool = False

    def has(self, *metrics: str) -> bool:
        """Whether all of these were measured now, with a finite value."""
        return all(math.isfinite(self.now.get(metric, math.nan)) for metric in metrics)


@dataclass(frozen=True)
class Judgement:
    """The severity of a layer's state.

    Attributes:
        severity: 1 at the threshold; 2 is twice as far beyond it.
        evidence: the numbers it is based on, by name.
        words: the same in a few words.
        component: what the fact itself says is wrong, as that of an :class:`~rankscope.monitor.readings.Alarm`;
            ``"unknown"`` for a state, which follows from something else.
        may_pass: whether healthy runs are in this state for a while, so that it has to last for :data:`TRANSIENT`
            readings and :data:`TRANSIENT_STEPS` steps, unless gradients have vanished.
    """

    severity: float
    evidence: Mapping[str, float]
    words: str
    component: str = "unknown"
    may_pass: bool = False


Rule = Callable[[LayerState], "Judgement | None"]


@dataclass(frozen=True)
class AlarmSpec:
    """An alarm: facts, and one pure function of a layer's state.

    Attributes:
        name: the function's name.
        summary: first line of its docstring.
        metrics: the metrics it uses.
        title: the beginning of its sentence.
        confirm: number of consecutive readings beyond the threshold before it is raised, and below ``release``
            before it is cleared.
        release: severity below which it is cleared; between ``release`` and 1 nothing changes.
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
    confirm: int
    release: float
    cites: tuple[Cite, ...]
    to_do: str
    is_event: bool
    is_note: bool
    rule: Rule

    __repr__ = brief


SETTLED = 0.05
"""Norm of the gradient of the whole model, relative to the first readings, at which training has settled. While a model
learns how frequent each token is, gradients of its blocks vanish, but not those of embeddings and head."""
CONVERGED = 0.25
"""Loss relative to the first readings, at which a low loss explains what gradients and tokens look like."""
DEEP = 8.0
"""Severity of a collapse that no healthy run was seen to pass through."""
TRANSIENT, TRANSIENT_STEPS = 24, 1000
"""Readings and steps for which a mild collapse has to last. While a model learns how frequent each token is, a common
vector dominates, and tokens look alike, also in healthy runs: a GPT-2 of width 16 for 170 steps. How long that lasts
depends on the model, so that the number is generous; the gradient of the whole model tells such a phase from a state
that stays (:data:`SETTLED`)."""

ALARMS: Registry[AlarmSpec] = Registry("alarm", __package__)


def alarm(
    *,
    metrics: tuple[str, ...],
    title: str,
    confirm: int = 2,
    release: float = 0.5,
    cites: tuple[Cite, ...] = (),
    to_do: str = "",
    is_event: bool = False,
    is_note: bool = False,
) -> Callable[[Rule], Rule]:
    """Register a rule; see :class:`AlarmSpec`."""

    def register(rule: Rule) -> Rule:
        summary = (rule.__doc__ or "").strip().split("\n", 1)[0]
        facts = (metrics, title, confirm, release, cites, to_do, is_event, is_note)
        ALARMS.add(rule.__name__, AlarmSpec(rule.__name__, summary, *facts, rule))
        return rule

    return register


def fallen(now: float, limit: float) -> float:
    """Severity of a value at or below a limit: 1 there, 2 at half of that."""
    return math.inf if now <= 0.0 else limit / now
