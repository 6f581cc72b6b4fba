"""Turns readings into alarms, with hysteresis: raised beyond the threshold, cleared well below it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rankscope._types import Status
from rankscope.monitor.alarms import ALARMS, AlarmSpec, Judgement, LayerState
from rankscope.monitor.alarms._spec import CONVERGED, SETTLED, TRANSIENT, TRANSIENT_STEPS
from rankscope.monitor.readings import Alarm, AlarmState, LayerValue

START_READINGS = 3
"""How many of the first readings define the start of the run: their median tolerates one outlier."""
_TOTAL = "total_gradient_norm"
Place = tuple[str | None, int | None]
"""Stack and layer; a layer of None holds the facts about the whole model and the batch."""


class References:
    """Remembers the first readings of every metric and layer, in constant memory."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, Place], list[float]] = {}
        self._losses: deque[float] = deque(maxlen=3)

    def take(self, table: Sequence[LayerValue]) -> None:
        """Record a reading."""
        for row in table:
            place = (row.stack, row.layer)
            known = self._first.setdefault((row.metric, place), [])
            if len(known) < START_READINGS and math.isfinite(row.mean):
                known.append(row.mean)
            if row.metric == "loss" and math.isfinite(row.mean):
                self._losses.append(row.mean)

    def states(self, table: Sequence[LayerValue]) -> dict[Place, LayerState]:
        """The input of the rules for every layer."""
        now: dict[Place, dict[str, float]] = {}
        undefined: dict[Place, set[str]] = {}
        for row in table:
            now.setdefault((row.stack, row.layer), {})[row.metric] = row.mean
            if row.status == Status.UNDEFINED:
                undefined.setdefault((row.stack, row.layer), set()).add(row.metric)
        gradient, loss = (max(self._first.get((name, (None, None)), ()), default=0.0) for name in (_TOTAL, "loss"))
        settled = any(row.metric == _TOTAL and row.mean <= SETTLED * gradient for row in table)
        converged = bool(self._losses) and 0.0 <= median(self._losses) <= CONVERGED * loss
        found = {}
        for place, values in sorted(now.items(), key=lambda item: (str(item[0][0]), depth(item[0][1]))):
            first = {metric: self._first.get((metric, place), ()) for metric in values}
            found[place] = LayerState(
                now=values,
                start={metric: median(known) if known else math.nan for metric, known in first.items()},
                undefined=frozenset(undefined.get(place, ())),
                highest={metric: max(known, default=math.nan) for metric, known in first.items()},
                settled=settled,
                converged=converged,
            )
        return found


Explain = Callable[[AlarmSpec, Judgement], tuple[str, str]]
"""The component of an alarm that is being raised, and what is said after its numbers."""


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

    @property
    def names(self) -> frozenset[str]:
        """Names of what may be raised or noted."""
        return frozenset(spec.name for spec in self._specs) - self._silenced

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the active alarms."""
        notes = {spec.name for spec in self._specs if spec.is_note}
        active = {name for (name, _), memory in self._memory.items() if memory.active and name not in notes}
        return tuple(sorted(active - self._silenced))

    def silence(self, names: Sequence[str]) -> None:
        """Never raise these alarms again."""
        self._silenced |= {ALARMS[name].name for name in names}

    def look(self, step: int, states: Mapping[Place, LayerState], explain: Explain) -> tuple[Alarm, ...]:
        """What this reading raises, clears or notes; ``explain`` is called only for what is raised."""
        stacks = dict.fromkeys(stack for stack, _ in states)
        return tuple(
            alarm
            for spec in self._specs
            if spec.name not in self._silenced
            for stack in stacks
            for alarm in self._look_at(spec, step, stack, states, explain)
        )

    def _look_at(
        self,
        spec: AlarmSpec,
        step: int,
        stack: str | None,
        states: Mapping[Place, LayerState],
        explain: Explain,
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
            told = ("none", "") if spec.is_note else explain(spec, known[first])
            yield _raised(spec, step, stack, first, worst, known, told)
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
    told: tuple[str, str],
) -> Alarm:
    component, words = told
    deepest = f", worst at block {worst}: {known[worst].words}" if worst != first else ""
    seen = f"{known[first].words}{deepest}."
    # An alarm without words of its own is said by its explanation alone.
    sentence = f"{spec.title}{_place(stack, first)}, step {step}: {seen if known[first].words else ''}".rstrip()
    sentence = " ".join(part for part in (sentence, words, spec.to_do) if part)
    evidence = {**known[first].evidence, "severity": known[first].severity}
    if worst is not None:
        evidence["worst_layer"] = float(worst)
        evidence |= {f"worst_{name}": value for name, value in known[worst].evidence.items()}
    state: AlarmState = "noted" if spec.is_note else "raised"
    return Alarm(spec.name, state, step, stack, first, sentence, evidence, component)


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
