"""The declaration of an alarm, and the decorator that registers one. This file does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rankscope._citations import Cite
from rankscope._registry import Registry


@dataclass(frozen=True)
class LayerState:
    """The input of an alarm's rule: one layer now, at the start of the run, and for random tokens.

    Attributes:
        now: means over the probe, by metric.
        start: medians over the first readings of the run.
        null: means over random tokens of the same shape.
        largest_at_start: largest ``start`` over all layers of the stack.
        undefined: metrics that were measured now but have no value in most sequences.
    """

    now: Mapping[str, float]
    start: Mapping[str, float]
    null: Mapping[str, float]
    largest_at_start: Mapping[str, float]
    undefined: frozenset[str] = frozenset()

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
    """

    severity: float
    evidence: Mapping[str, float]
    words: str


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
        blames: whether the ledger of skip adds can identify the component.
        cites: its sources.
        rule: the function.
    """

    name: str
    summary: str
    metrics: tuple[str, ...]
    title: str
    confirm: int
    release: float
    blames: str | None
    cites: tuple[Cite, ...]
    rule: Rule


ALARMS: Registry[AlarmSpec] = Registry("alarm", "rankscope.monitor.alarms")


def alarm(
    *,
    metrics: tuple[str, ...],
    title: str,
    confirm: int = 2,
    release: float = 0.5,
    blames: str | None = None,
    cites: tuple[Cite, ...] = (),
) -> Callable[[Rule], Rule]:
    """Register a rule; ``blames`` names the component if the ledger is not used."""

    def register(rule: Rule) -> Rule:
        summary = (rule.__doc__ or "").strip().split("\n", 1)[0]
        facts = (metrics, title, confirm, release, blames, cites)
        ALARMS.add(rule.__name__, AlarmSpec(rule.__name__, summary, *facts, rule))
        return rule

    return register


def fallen(now: float, reference: float, factor: float) -> float:
    """Severity of a fall to ``factor`` times a reference: 1 there, 2 at half of that."""
    if not math.isfinite(reference) or reference <= 0.0:
        return 0.0
    return math.inf if now <= 0.0 else factor * reference / now


def share_above(share: float, null: float, limit: float) -> float:
    """Severity of a share above chance: 1 if it is ``limit`` of the way from chance to everything."""
    if not math.isfinite(null) or null >= 1.0:
        return 0.0
    return max(0.0, (share - null) / (1.0 - null)) / limit
