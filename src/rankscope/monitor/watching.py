"""Turns readings into alarms: raised once a breach was read often enough in a row, cleared when it no longer is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rankscope._types import Status
from rankscope.monitor.alarms import ALARMS, AlarmSpec, Breach, LayerState
from rankscope.monitor.readings import Alarm, AlarmState, LayerValue

FIRST = 3
"""How many of the first readings are the start of the run."""
SETTLED = 0.05
"""Norm of the gradient of the whole model, relative to the first readings, at which training has settled. While a model
learns how frequent each token is, gradients of its blocks vanish, but not those of embeddings and head."""
CONVERGED = 0.25
"""Loss relative to the first readings, at which a low loss explains what gradients and tokens look like."""
Place = tuple[str | None, int | None]
"""Stack and layer; a layer of None holds the facts about the whole model and the batch."""


class References:
    """Remembers the first readings of every metric and layer, in constant memory."""

    def __init__(self) -> None:
        self._first: dict[Place, dict[str, list[float]]] = {}
        self._losses: deque[float] = deque(maxlen=FIRST)

    def take(self, table: Sequence[LayerValue]) -> None:
        """Record a reading."""
        for row in table:
            known = self._first.setdefault((row.stack, row.layer), {}).setdefault(row.metric, [])
            if len(known) < FIRST and math.isfinite(row.mean):
                known.append(row.mean)
            if row.metric == "loss" and math.isfinite(row.mean):
                self._losses.append(row.mean)

    def states(self, table: Sequence[LayerValue]) -> dict[Place, LayerState]:
        """What alarms are asked about, for every layer, the whole model first."""
        now: dict[Place, dict[str, float]] = {}
        undefined: dict[Place, set[str]] = {}
        for row in table:
            now.setdefault((row.stack, row.layer), {})[row.metric] = row.mean
            if row.status == Status.UNDEFINED:
                undefined.setdefault((row.stack, row.layer), set()).add(row.metric)
        whole = self._first.get((None, None), {})
        gradient, loss = (max(whole.get(name, ()), default=0.0) for name in ("total_gradient_norm", "loss"))
        norm = now.get((None, None), {}).get("total_gradient_norm", math.inf)
        settled = norm <= SETTLED * gradient
        converged = bool(self._losses) and 0.0 <= median(self._losses) <= CONVERGED * loss
        return {
            place: LayerState(
                values, self._first.get(place, {}), frozenset(undefined.get(place, ())), settled, converged
            )
            for place, values in sorted(now.items(), key=lambda item: (str(item[0][0]), _depth(item[0][1])))
        }


Explain = Callable[[AlarmSpec, Breach], tuple[str, str]]
"""The component of an alarm that is being raised, and what is said after its numbers."""


@dataclass
class _Memory:
    """The state of one alarm in one stack: whether it stands, and since when the readings say otherwise."""

    active: bool = False
    count: int = 0
    since: int = 0


class AlarmWatch:
    """Asks every alarm about every reading.

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
        found = []
        for spec in self._specs:
            for stack in dict.fromkeys(stack for stack, _ in states) if spec.name not in self._silenced else ():
                own = {layer: state for (of, layer), state in states.items() if of == stack}
                found.append(self._look_at(spec, step, stack, own, explain))
        return tuple(one for one in found if one is not None)

    def _look_at(
        self, spec: AlarmSpec, step: int, stack: str | None, states: Mapping[int | None, LayerState], explain: Explain
    ) -> Alarm | None:
        found = {layer: breach for layer, state in states.items() if (breach := spec.rule(state)) is not None}
        if spec.is_event:
            return _raised(spec, step, stack, found, explain) if found else None
        if not found and not any(state.has(metric) for state in states.values() for metric in spec.metrics):
            return None  # not tested at this reading
        memory = self._memory.setdefault((spec.name, stack), _Memory())
        if bool(found) is memory.active:
            memory.count = 0
            return None
        memory.count += 1
        memory.since = step if memory.count == 1 else memory.since
        lasting = min((breach.lasting for breach in found.values()), default=0)
        if memory.count < spec.readings or step - memory.since < lasting:
            return None
        memory.active, memory.count = bool(found), 0
        if found:
            return _raised(spec, step, stack, found, explain)
        sentence = f"Over since step {step}: {spec.title.lower()}."
        return None if spec.is_note else Alarm(spec.name, "cleared", step, stack, None, sentence, {}, "none")


def chosen_alarms(names: Sequence[str] | None) -> tuple[AlarmSpec, ...]:
    """The alarms of these names, all of them for None."""
    return tuple(ALARMS[name] for name in dict.fromkeys(ALARMS if names is None else names))


def _raised(
    spec: AlarmSpec, step: int, stack: str | None, found: Mapping[int | None, Breach], explain: Explain
) -> Alarm:
    first = min(found, key=_depth)
    component, words = ("none", "") if spec.is_note else explain(spec, found[first])
    others = [str(layer) for layer in found if layer != first]
    more = f"; also at {'blocks' if len(others) > 1 else 'block'} {', '.join(others)}" if others else ""
    place = "" if first is None else f" at block {first}{f' of the {stack}' if stack else ''}"
    # An alarm without words of its own is said by its explanation alone.
    seen = f"{found[first].words}{more}." if found[first].words else ""
    sentence = " ".join(part for part in (f"{spec.title}{place}, step {step}:", seen, words, spec.to_do) if part)
    state: AlarmState = "noted" if spec.is_note else "raised"
    return Alarm(spec.name, state, step, stack, first, sentence, found[first].evidence, component)


def _depth(layer: int | None) -> int:
    """A key by which to sort layers, the whole model first."""
    return -1 if layer is None else layer
