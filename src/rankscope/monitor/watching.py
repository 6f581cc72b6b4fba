"""Turns readings into alarms, with hysteresis: raised beyond the threshold, cleared well below it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from rankscope._types import Status
from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.precision import float_floor
from rankscope.metrics import MetricSpec, evaluate
from rankscope.monitor.alarms import ALARMS, AlarmSpec, Judgement, LayerState, LevelChange
from rankscope.monitor.alarms._spec import CONVERGED, SETTLED, TRANSIENT, TRANSIENT_STEPS
from rankscope.monitor.alarms.data_shift import LIMIT as DATA_JUMP
from rankscope.monitor.causes import FAST, RAISED, RECENT, WRITTEN, Cause, Moment
from rankscope.monitor.changes import RESOLVED, RESOLVED_OF_BATCH, Peak, Series
from rankscope.monitor.readings import Alarm, LayerValue
from rankscope.verbs.measure.choosing import DRAWS, gaussian_null

START_READINGS = 3
"""How many of the first readings define the start of the run: their median tolerates one outlier."""

REMEMBERED = 64
"""Readings that causes may look back at."""
FOLLOWS = 32
"""Steps between a change and a rise of the loss, at most, for the loss to have followed the change."""
_LARGEST_NULL = 256
_TOTAL = "total_gradient_norm"
Place = tuple[str | None, int | None]
"""Stack and layer; a layer of None holds the facts about the whole model and the batch."""


def random_null(specs: Sequence[MetricSpec], shapes: Collection[tuple[int, int]], seed: int = 0) -> dict[str, float]:
    """Mean of each metric over Gaussian tokens, or over attention of Gaussian scores. **Estimate**, eight draws.

    Metrics that depend on the scale of the model are excluded. Scores have unit variance and no mask.
    """
    null = {name: float(entry["mean"]) for name, entry in gaussian_null(specs, shapes, seed=seed).items()}
    of_attention = [spec for spec in specs if spec.side == "attention"]
    if of_attention and shapes:
        tokens = min(max(shapes)[0], _LARGEST_NULL)
        generator = torch.Generator().manual_seed(seed)
        probs = torch.randn(DRAWS, tokens, tokens, generator=generator, dtype=torch.float64).softmax(-1)
        values = evaluate(of_attention, AttentionMatrix(probs), float_floor(probs.dtype)).values
        null |= {spec.name: float(row.mean()) for spec, row in zip(of_attention, values, strict=True)}
    return null


class References:
    """Remembers the first and the last readings of every metric and layer, in constant memory."""

    def __init__(self) -> None:
        self.null: Mapping[str, float] = {}
        self._jumping = {metric for spec in ALARMS.values() if spec.jumps for metric in spec.metrics}
        self._peaking = {metric for spec in ALARMS.values() if spec.peaks for metric in spec.metrics}
        self._first: dict[tuple[str, Place], list[float]] = {}
        self._series: dict[tuple[str, Place], Series] = {}
        self._changes: dict[Place, dict[str, LevelChange]] = {}
        self._peaks: dict[tuple[str, str | None], Peak] = {}
        self._peak: dict[tuple[str, str | None], float] = {}
        self.past: deque[Moment] = deque(maxlen=REMEMBERED)

    def take(self, table: Sequence[LayerValue], step: int | None = None) -> None:
        """Record a reading; without a step, readings are taken to be evenly spaced."""
        self._changes = {}
        largest: dict[tuple[str, str | None], float] = {}
        for row in table:
            place = (row.stack, row.layer)
            known = self._first.setdefault((row.metric, place), [])
            if len(known) < START_READINGS and math.isfinite(row.mean):
                known.append(row.mean)
            if row.metric in self._jumping:
                resolved = RESOLVED_OF_BATCH if row.metric.startswith("batch_") else RESOLVED
                change = self._series.setdefault((row.metric, place), Series(resolved)).take(row.mean)
                self._changes.setdefault(place, {})[row.metric] = change
            if row.metric in self._peaking and math.isfinite(row.mean):
                largest[row.metric, row.stack] = max(row.mean, largest.get((row.metric, row.stack), 0.0))
        self._peak = {key: self._peaks.setdefault(key, Peak()).take(value, step) for key, value in largest.items()}
        whole = {row.metric: row.mean for row in table if row.layer is None}
        self.past.append(
            Moment(
                step=self.past[-1].step + 1 if step is None and self.past else step or 0,
                motion={(row.stack, row.layer): row.mean for row in table if row.metric == "weight_motion"},
                rate=whole.get("learning_rate", math.nan),
                loss=whole.get("loss", math.nan),
                written=tuple(row for row in table if row.metric in WRITTEN and row.mean >= 1.0),
                spread=next((row for row in table if row.metric == "embedding_spread"), None),
                contradiction=next((row for row in table if row.metric == "settings_contradiction"), None),
                data=any(
                    change.score >= DATA_JUMP
                    for metric, change in self._changes.get((None, None), {}).items()
                    if metric in ALARMS["data_shift"].metrics
                ),
            )
        )

    def states(self, table: Sequence[LayerValue]) -> dict[Place, LayerState]:
        """The input of the rules for every layer."""
        now: dict[Place, dict[str, float]] = {}
        undefined: dict[Place, set[str]] = {}
        for row in table:
            now.setdefault((row.stack, row.layer), {})[row.metric] = row.mean
            if row.status == Status.UNDEFINED:
                undefined.setdefault((row.stack, row.layer), set()).add(row.metric)
        starts = {key: median(values) for key, values in self._first.items() if values}
        settled, converged, restarted = self._settled(table), self._converged(), self._restarted()
        largest: dict[tuple[str, str | None], float] = {}
        for (metric, (stack, _)), value in starts.items():
            largest[metric, stack] = max(value, largest.get((metric, stack), -math.inf))
        return {
            place: LayerState(
                now=values,
                start={metric: starts.get((metric, place), math.nan) for metric in values},
                null=self.null,
                largest_at_start={metric: largest.get((metric, place[0]), math.nan) for metric in values},
                undefined=frozenset(undefined.get(place, ())),
                changes=self._changes.get(place, {}),
                highest={metric: max(self._first.get((metric, place), ()), default=math.nan) for metric in values},
                peak={metric: self._peak.get((metric, place[0]), math.nan) for metric in values},
                settled=settled,
                converged=converged,
                restarted=restarted,
            )
            for place, values in sorted(now.items(), key=lambda item: (str(item[0][0]), depth(item[0][1])))
        }

    def _converged(self) -> bool:
        first = self._first.get(("loss", (None, None)), ())
        last = [one.loss for one in list(self.past)[-3:] if math.isfinite(one.loss)]
        return bool(last) and 0.0 <= median(last) <= CONVERGED * max(first, default=0.0)

    def _restarted(self) -> bool:
        """Whether the learning rate, or the motion of the weights if it is not known, rose in the last readings.

        So it did if blocks that were frozen have begun to move.
        """
        motion = max((one.fastest for one in list(self.past)[-RECENT // 2 :]), default=math.nan)
        blocks = self.past[-1].motion if self.past else {}
        series = [[one.rate for one in self.past], [one.fastest for one in self.past]]
        series += [[one.motion.get(place, math.nan) for one in self.past] for place in blocks]
        for number, values in enumerate(series):
            known = [value for value in values if math.isfinite(value)]
            before, last = known[: -RECENT // 2], known[-RECENT // 2 :]
            if len(before) < 3 or not motion < FAST:
                continue
            level = median(before[-RECENT:])
            if max(last) > level == 0.0 or (number < 2 and max(last) >= RAISED * level > 0.0):
                return True
        return False

    def _settled(self, table: Sequence[LayerValue]) -> bool:
        first = self._first.get((_TOTAL, (None, None)), ())
        return any(row.metric == _TOTAL and row.mean <= SETTLED * max(first, default=0.0) for row in table)


def worst_of(spec: AlarmSpec, stack: str | None, states: Mapping[Place, LayerState]) -> tuple[float, float] | None:
    """The largest severity, and what is measured there; None if nothing can be judged."""
    judged = [(spec.rule(state), state) for place, state in states.items() if place[0] == stack]
    known = [(judgement.severity, state.now[spec.metrics[0]]) for judgement, state in judged if judgement is not None]
    return max(known, key=lambda entry: entry[0], default=None)


Blame = Callable[[AlarmSpec, str | None, int | None], Cause]


@dataclass
class _Memory:
    """The state of one alarm in one stack."""

    active: bool = False
    in_a_row: int = 0
    since: int = 0


class AlarmWatch:
    """Checks every alarm on every reading.

    Args:
        specs: the alarms.
    """

    def __init__(self, specs: Sequence[AlarmSpec]) -> None:
        self._specs = tuple(specs)
        self._silenced: set[str] = set()
        self._memory: dict[tuple[str, str | None], _Memory] = {}
        self._changes: dict[tuple[str, str | None], Alarm] = {}  # noted, and not yet followed by the loss

    @property
    def names(self) -> frozenset[str]:
        """Names of what may be raised or noted."""
        return frozenset(spec.name for spec in self._specs) - self._silenced

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the active alarms."""
        silent = {spec.name for spec in self._specs if spec.is_note or spec.needs_loss}
        active = {name for (name, _), memory in self._memory.items() if memory.active and name not in silent}
        return tuple(sorted(active - self._silenced))

    def silence(self, names: Sequence[str]) -> None:
        """Never raise these alarms again."""
        self._silenced |= {ALARMS[name].name for name in names}

    def look(self, step: int, states: Mapping[Place, LayerState], blame: Blame) -> tuple[Alarm, ...]:
        """What this reading raises, clears or notes; ``blame`` is called only for what is raised."""
        stacks = dict.fromkeys(stack for stack, _ in states)
        whole = states.get((None, None))
        since = step - whole.now.get("loss_risen", math.nan) if whole is not None else math.nan
        found: list[Alarm] = []
        for spec in self._specs:
            for stack in stacks if spec.name not in self._silenced else ():
                found += self._look_at(spec, step, stack, states, blame)
                change = self._changes.get((spec.name, stack))
                if change is not None and abs(since - change.step) <= FOLLOWS:
                    del self._changes[spec.name, stack]
                    words = f"{change.sentence} Since then the loss has stayed above all of its past."
                    found.append(replace(change, state="raised", step=step, sentence=words))
        return tuple(found)

    def _look_at(
        self,
        spec: AlarmSpec,
        step: int,
        stack: str | None,
        states: Mapping[Place, LayerState],
        blame: Blame,
    ) -> Iterator[Alarm]:
        judged = {place[1]: spec.rule(state) for place, state in states.items() if place[0] == stack}
        known = {layer: judgement for layer, judgement in judged.items() if judgement is not None}
        if not known:
            if spec.is_event and (spec.name, stack) in self._memory:
                self._memory[spec.name, stack] = _Memory()  # what was read only once is over
            return
        memory = self._memory.setdefault((spec.name, stack), _Memory())
        worst = max(known, key=lambda layer: known[layer].severity)
        severity, lasts = known[worst].severity, known[worst].may_pass and memory.in_a_row > 0
        # An alarm that has to last is not started over by a reading slightly below the threshold.
        turns = severity < spec.release if memory.active else severity >= (spec.release if lasts else 1.0)
        memory.in_a_row = memory.in_a_row + 1 if turns else 0
        memory.since = step if memory.in_a_row == 1 else memory.since
        if memory.in_a_row < (spec.confirm if memory.active else self._needed(spec, step, stack, known[worst])):
            return
        memory.active, memory.in_a_row = not memory.active, 0
        if memory.active:
            affected = [layer for layer, judgement in known.items() if judgement.severity >= min(1.0, severity)]
            first = min(affected, key=depth)
            # What is read from a curve has no cause to be named: healthy runs bend it as well.
            cause = Cause("none", "") if spec.is_note else blame(spec, stack, first)
            found = _raised(spec, step, stack, first, worst, known, cause)
            if spec.needs_loss:
                self._changes[spec.name, stack] = found
            yield replace(found, state="noted") if spec.is_note or spec.needs_loss else found
        elif not (spec.is_event or spec.is_note):
            yield _cleared(spec, step, stack, worst, known[worst])

    def _needed(self, spec: AlarmSpec, step: int, stack: str | None, worst: Judgement) -> float:
        """How many readings in a row raise an alarm: many if healthy runs pass through this state."""
        if not worst.may_pass:
            return spec.confirm
        since = self._memory[spec.name, stack].since
        return TRANSIENT if step - since >= TRANSIENT_STEPS else math.inf


def chosen_alarms(names: Sequence[str] | None) -> tuple[AlarmSpec, ...]:
    """The alarms of these names, all of them for None."""
    return tuple(ALARMS[name] for name in dict.fromkeys(ALARMS if names is None else names))


def _raised(
    spec: AlarmSpec,
    step: int,
    stack: str | None,
    first: int | None,
    worst: int | None,
    known: Mapping[int | None, Judgement],
    cause: Cause,
) -> Alarm:
    deepest = f", worst at block {worst}: {known[worst].words}" if worst != first else ""
    seen = f"{known[first].words}{deepest}."
    # An alarm without words of its own is said by its cause alone.
    sentence = f"{spec.title}{_place(stack, first)}, step {step}: {seen if known[first].words else ''}".rstrip()
    sentence = " ".join(part for part in (sentence, cause.words, cause.change or spec.to_do) if part)
    evidence = {**known[first].evidence, "severity": known[first].severity}
    if worst is not None:
        evidence["worst_layer"] = float(worst)
        evidence |= {f"worst_{name}": value for name, value in known[worst].evidence.items()}
    return Alarm(spec.name, "raised", step, stack, first, sentence, evidence, cause.component)


def _cleared(spec: AlarmSpec, step: int, stack: str | None, worst: int | None, judgement: Judgement) -> Alarm:
    sentence = f"Over since step {step}: {spec.title.lower()}; now {judgement.words}{_place(stack, worst)}."
    return Alarm(spec.name, "cleared", step, stack, worst, sentence, judgement.evidence, "none")


def depth(layer: int | None) -> int:
    """A key by which to sort layers, the whole model first."""
    return -1 if layer is None else layer


def _place(stack: str | None, layer: int | None) -> str:
    if layer is None:
        return ""
    return f" at block {layer}" if stack is None else f" at block {layer} of the {stack}"
