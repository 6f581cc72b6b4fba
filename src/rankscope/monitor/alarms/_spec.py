"""The declaration of an alarm, and the decorator that registers one. This file does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rankscope._citations import Cite
from rankscope._printing import brief
from rankscope._registry import Registry


@dataclass(frozen=True)
class LevelChange:
    """How far a value is from what it was over the last readings.

    Attributes:
        score: the change divided by the largest change of the earlier readings; 0 if they are too few.
        before: the median of the last readings before the change.
    """

    score: float
    before: float


@dataclass(frozen=True)
class LayerState:
    """The input of an alarm's rule: one layer now, at the start of the run, and for random tokens.

    Facts about the whole model and about the batch are in a state of their own.

    Attributes:
        now: means over the probe, by metric.
        start: medians over the first readings of the run.
        null: means over random tokens of the same shape.
        largest_at_start: largest ``start`` over all layers of the stack.
        undefined: metrics that were measured now but have no value in most sequences.
        changes: how far each metric is from its last readings, for the metrics of alarms that declare ``jumps``.
        highest: largest of the first readings of the run, of this layer.
        peak: largest value of any layer of the stack, up to eight readings ago, for the metrics of alarms that declare
            ``peaks``.
        settled: whether the gradient of the whole model has nearly vanished since the start, so that training does not
            lead out of this state again.
        converged: whether the loss has fallen to a quarter of its start or less: what tokens or gradients look like
            then is what the objective asked for.
        restarted: whether the weights have begun to move several times as fast, at a usual speed: the learning rate was
            raised by its schedule, and everything else moves with it.
    """

    now: Mapping[str, float]
    start: Mapping[str, float]
    null: Mapping[str, float]
    largest_at_start: Mapping[str, float]
    undefined: frozenset[str] = frozenset()
    changes: Mapping[str, LevelChange] = field(default_factory=dict)
    highest: Mapping[str, float] = field(default_factory=dict)
    peak: Mapping[str, float] = field(default_factory=dict)
    settled: bool = False
    converged: bool = False
    restarted: bool = False

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
        may_pass: whether healthy runs are in this state for a while, so that it has to last for :data:`TRANSIENT`
            readings and :data:`TRANSIENT_STEPS` steps, unless gradients have vanished.
    """

    severity: float
    evidence: Mapping[str, float]
    words: str
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
        is_note: it is read from a curve, which healthy runs bend as well: it is written down and raises no alarm.
        needs_loss: it tells of a change that may be planned: it is written down, and raises an alarm only if the loss
            has stayed above its past ever since.
        jumps: the rule reads ``changes``, so that jumps of its metrics are tracked.
        peaks: the rule reads ``peak``, so that the largest values of its metrics are remembered.
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
    needs_loss: bool
    jumps: bool
    peaks: bool
    rule: Rule

    __repr__ = brief


SETTLED = 0.05
"""Norm of the gradient of the whole model, relative to the first readings, at which training has settled. While a model
learns how frequent each token is, gradients of its blocks vanish, but not those of embeddings and head."""
CONVERGED = 0.25
"""Loss relative to the first readings, at which a low loss explains what gradients and tokens look like."""
DEEP = 8.0
"""Severity of a collapse that no healthy run was seen to pass through."""
JUMP = 4.0
"""Score of a :class:`LevelChange` that is a jump."""
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
    needs_loss: bool = False,
    jumps: bool = False,
    peaks: bool = False,
) -> Callable[[Rule], Rule]:
    """Register a rule; see :class:`AlarmSpec`.

    Raises:
        TypeError: the rule reads what it does not declare, and would never be given.
    """

    def register(rule: Rule) -> Rule:
        summary = (rule.__doc__ or "").strip().split("\n", 1)[0]
        for declared, names in ((jumps, {"changes", "largest_change"}), (peaks, {"peak"})):
            if not declared and names & set(rule.__code__.co_names):
                missing = "jumps" if "changes" in names else "peaks"
                raise TypeError(f"The alarm {rule.__name__} has to declare {missing}=True: its rule reads them.")
        facts = (metrics, title, confirm, release, cites, to_do, is_event, is_note, needs_loss, jumps, peaks)
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


def largest_change(layer: LayerState, metrics: Iterable[str], limit: float) -> Judgement | None:
    """The largest change among these metrics; severity 1 at a score of ``limit``."""
    known = {name: layer.changes[name] for name in metrics if name in layer.changes and layer.has(name)}
    if not known:
        return None
    name = max(known, key=lambda name: known[name].score)
    now, change = layer.now[name], known[name]
    return Judgement(
        severity=change.score / limit,
        evidence={name: now, "before": change.before, "score": change.score},
        words=f"{name.replace('_', ' ')} {now:.3g}, {change.before:.3g} over the readings before, {change.score:.2g} "
        "times its largest change until then",
    )
