"""From readings to alarms, with hysteresis: raised when beyond, cleared when well below, for several readings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rankscope.monitor.advice import Advice
from rankscope.monitor.alarms import ALARMS, AlarmSpec, Judgement, LayerState
from rankscope.monitor.references import Place
from rankscope.runs.readings import Alarm

Blame = Callable[[str | None, int], str]
Advise = Callable[[AlarmSpec, str | None], Advice]


@dataclass
class _Memory:
    """What is remembered of one alarm in one stack."""

    active: bool = False
    in_a_row: int = 0


class Watch:
    """Holds every alarm against every reading.

    Args:
        specs: the alarms.
    """

    def __init__(self, specs: Sequence[AlarmSpec]) -> None:
        self._specs = tuple(specs)
        self._memory: dict[tuple[str, str | None], _Memory] = {}

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the alarms that stand."""
        return tuple(sorted({name for (name, _), memory in self._memory.items() if memory.active}))

    def look(self, step: int, states: Mapping[Place, LayerState], blame: Blame, advise: Advise) -> tuple[Alarm, ...]:
        """The alarms that this reading raises or clears; ``blame`` and ``advise`` are asked only for those raised."""
        stacks = dict.fromkeys(stack for stack, _ in states)
        found: list[Alarm] = []
        for spec in self._specs:
            for stack in stacks:
                found += self._look_at(spec, step, stack, states, blame, advise)
        return tuple(found)

    def _look_at(
        self,
        spec: AlarmSpec,
        step: int,
        stack: str | None,
        states: Mapping[Place, LayerState],
        blame: Blame,
        advise: Advise,
    ) -> Iterator[Alarm]:
        judged = {place[1]: spec.rule(state) for place, state in states.items() if place[0] == stack}
        known = {layer: judgement for layer, judgement in judged.items() if judgement is not None}
        if not known:
            return
        memory = self._memory.setdefault((spec.name, stack), _Memory())
        worst = max(known, key=lambda layer: known[layer].severity)
        turns = known[worst].severity < spec.release if memory.active else known[worst].severity >= 1.0
        memory.in_a_row = memory.in_a_row + 1 if turns else 0
        if memory.in_a_row < spec.confirm:
            return
        memory.active, memory.in_a_row = not memory.active, 0
        if memory.active:
            first = min(layer for layer, judgement in known.items() if judgement.severity >= 1.0)
            component = spec.blames if spec.blames is not None else blame(stack, first)
            yield _raised(spec, step, stack, first, worst, known, component, advise(spec, stack))
        else:
            yield _cleared(spec, step, stack, worst, known[worst])


def chosen_alarms(names: Sequence[str] | None) -> tuple[AlarmSpec, ...]:
    """The alarms of these names, all of them for None."""
    return tuple(ALARMS[name] for name in dict.fromkeys(ALARMS if names is None else names))


def _raised(
    spec: AlarmSpec,
    step: int,
    stack: str | None,
    first: int,
    worst: int,
    known: Mapping[int, Judgement],
    component: str,
    advice: Advice,
) -> Alarm:
    depth = f", worst at layer {worst}: {known[worst].words}" if worst != first else ""
    sentence = (
        f"{spec.title} at {_place(stack, first)}, step {step}: {known[first].words}{depth}. "
        f"Likely component: {component}. {advice.words}"
    )
    evidence = {**known[first].evidence, "severity": known[first].severity, "worst_layer": float(worst)}
    evidence |= {f"worst_{name}": value for name, value in known[worst].evidence.items()}
    return Alarm(spec.name, "raised", step, stack, first, sentence, evidence, component, advice.remedies)


def _cleared(spec: AlarmSpec, step: int, stack: str | None, worst: int, judgement: Judgement) -> Alarm:
    sentence = f"Over since step {step}: {spec.title.lower()}; now {judgement.words} at {_place(stack, worst)}."
    return Alarm(spec.name, "cleared", step, stack, worst, sentence, judgement.evidence, "none", ())


def _place(stack: str | None, layer: int) -> str:
    return f"layer {layer}" if stack is None else f"layer {layer} of the {stack}"
