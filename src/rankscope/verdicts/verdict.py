"""The verdict on a run, based on the battery, with its evidence. Never a single health score."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rankscope.runs._frozen import freeze, thaw
from rankscope.runs.not_finite import CODE, Lost, first_not_finite
from rankscope.runs.rows import within_sequences
from rankscope.runs.summary import stacks_of
from rankscope.verdicts.battery import read_battery
from rankscope.verdicts.reading import StackReading, read_stack
from rankscope.verdicts.sentences import explained, in_words, not_excluded, say, token_sentences
from rankscope.verdicts.states import State

HARM = "This describes the activations; whether it hurts depends on your task."

NEXT_STEPS: Mapping[State, tuple[str, ...]] = {
    State.HUGE_TOKEN: ("rankscope measure {model} --tokens-policy no-first",),
    State.CLUSTERS: ("rankscope measure {model} --similarity",),
    State.COPIES: ("rankscope measure {model} --similarity",),
    State.SAME_DIRECTION: ("rankscope ablate {model}",),
    State.COLLAPSING: ("rankscope exact {model}", "rankscope ablate {model}"),
    State.COLLAPSED: ("rankscope ablate {model}",),
    State.FLOOR: ("rankscope exact {model}", "rankscope ablate {model}"),
    State.VANISHED: ("rankscope doctor {model}",),
    State.NOT_FINITE: ("rankscope doctor {model}",),
}
"""One or two commands worth running after a run in this state."""


@dataclass(frozen=True)
class Verdict:
    """What the battery says.

    Args:
        sentence: the state, where it holds and its numbers; one line per axis if there are several.
        evidence: those values: code, metric, site, stack, layer, value, the number of sequences out of how many, and
            the axis if it is not tokens.
        code: that of a :class:`State`, such as ``"healthy"`` or ``"collapsed"``; ``bound`` has ``"holds"`` and
            ``"violated"``, and a verb that judges nothing has None.
        next_steps: one or two commands worth running next.
        axes: findings along axes other than tokens, as JSON; see :mod:`rankscope.verdicts.axes`.
        details: what the states mean, and every value behind them.
    """

    sentence: str
    evidence: tuple[Mapping[str, Any], ...]
    code: str | None
    next_steps: tuple[str, ...] = ()
    axes: tuple[Mapping[str, Any], ...] = ()
    details: str = ""

    def __post_init__(self) -> None:
        for name in ("evidence", "axes"):
            object.__setattr__(self, name, freeze(getattr(self, name)))

    def __reduce__(self) -> tuple[Any, ...]:
        evidence, axes = (tuple(thaw(part)) for part in (self.evidence, self.axes))
        return (Verdict, (self.sentence, evidence, self.code, tuple(self.next_steps), axes, self.details))

    def __str__(self) -> str:
        return self.sentence

    def fields(self) -> dict[str, Any]:
        """The arguments of a :class:`~rankscope.runs.run.Run` that hold it."""
        return {
            "verdict": self.sentence,
            "evidence": self.evidence,
            "code": self.code,
            "next_steps": self.next_steps,
        }


def steps_for(state: State, model: str | None) -> tuple[str, ...]:
    """Commands worth running next about ``model``; a module in memory, which a command cannot name, is called MODEL."""
    return tuple(step.format(model=shlex.quote(model) if model else "MODEL") for step in NEXT_STEPS.get(state, ()))


def judge_rows(
    table: pa.Table,
    null: Mapping[str, Any] | None = None,
    *,
    floor_relative: float | None = None,
    lengths: Mapping[str | None, Mapping[int, int]] | None = None,
    dim: int | None = None,
    model: str | None = None,
) -> Verdict:
    """Derive a verdict from the parts of the battery in ``table``. Heuristic: the thresholds are conventions.

    Each stack and each sequence is judged separately. The verdict is named after the gravest state that half of the
    sequences reach; for a collapse, a float floor, a zero stream and NaN, one sequence is enough. Of a run at several
    lengths, the longest is judged.

    Args:
        table: rows of a run. The status of a value, not its size, says that it is at the float floor.
        null: per metric ``{"mean", "sd", "draws"}`` over same-shape random tokens.
        floor_relative: relative residual at which the format shows only rounding, to print; None if unknown.
        lengths: by stack, the number of tokens of each sequence.
        dim: width of the stream.
        model: name of the model on the command line, for the next steps.
    """
    table = within_sequences(table)
    readings: dict[str | None, StackReading] = {}
    for stack in stacks_of(table):
        battery = read_battery(table, stack, lengths=(lengths or {}).get(stack), dim=dim)
        if battery is not None:
            readings[stack] = read_stack(battery)
    lost = first_not_finite(table)
    if not readings and lost is None:
        return Verdict(say("not measured"), (), State.UNKNOWN.code)
    by_stack, details = [], []
    for stack, reading in readings.items():
        name = f"{str(stack).capitalize()}: " if len(readings) > 1 else ""
        by_stack.append(name + " ".join(token_sentences(reading, floor_relative)))
        details.append(name + explained(reading, null or {}))
    evidence = tuple(item for stack, reading in readings.items() for item in _evidence(reading, stack))
    gravest = max(readings.values(), key=lambda reading: reading.state, default=None)
    details.append(HARM)
    if lost is not None:
        finite = None if gravest is None or gravest.state is State.UNKNOWN else gravest
        words = not_finite(lost, finite)
        evidence = (dict(lost.evidence()), *(evidence if finite else ()))
        return Verdict(words, evidence, CODE, steps_for(State.NOT_FINITE, model), details="\n".join(details))
    assert gravest is not None
    words = " ".join([*by_stack, *not_excluded(list(readings.values()))])
    return Verdict(words, evidence, gravest.state.code, steps_for(gravest.state, model), details="\n".join(details))


def not_finite(lost: Lost, finite: StackReading | None) -> str:
    """Where a run is not finite, and the gravest state elsewhere, if there is one."""
    rest = [say("others", whose="Where it is finite", state=in_words(finite))] if finite is not None else []
    return " ".join([str(lost), *rest])


def _evidence(reading: StackReading, stack: str | None) -> list[dict[str, Any]]:
    """The values behind the sentences, including those about other sequences."""
    counted = {"sequences": int(reading.members.sum()), "of_sequences": reading.members.size}
    own = [{**entry, **counted} for entry in reading.cited_values(stack)]
    if not own and reading.state is not State.UNKNOWN:
        own = [{"code": reading.state.code, "site": reading.battery.site, "stack": stack, **counted}]
    return own + [item for beside in reading.besides for item in _evidence(beside, stack)]
