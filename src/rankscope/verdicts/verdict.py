"""One sentence about a run, based on the battery, with its evidence. Never a single health score."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rankscope.runs._frozen import freeze, thaw
from rankscope.runs.not_finite import CODE, Lost, first_not_finite
from rankscope.runs.rows import INTERVAL, at_longest, of_stack, only, within_sequences
from rankscope.runs.summary import stacks_of
from rankscope.verdicts.battery import PARTS, read_battery
from rankscope.verdicts.reading import StackReading, read_stack
from rankscope.verdicts.sentences import not_excluded, sentence_for
from rankscope.verdicts.states import FEW_DIRECTIONS, NARROW_DIMENSION, State

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
        sentence: the verdict, with the values it is based on; one line per axis if there are several.
        evidence: those values: code, metric, site, stack, layer, value, the number of sequences out of how many, and
            the axis if it is not tokens.
        code: that of a :class:`State`, such as ``"healthy"`` or ``"collapsed"``; ``bound`` has ``"holds"`` and
            ``"violated"``, and a verb that judges nothing has None.
        next_steps: one or two commands worth running next.
        axes: findings along axes other than tokens, as JSON; see :mod:`rankscope.verdicts.axes`.
    """

    sentence: str
    evidence: tuple[Mapping[str, Any], ...]
    code: str | None
    next_steps: tuple[str, ...] = ()
    axes: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name in ("evidence", "axes"):
            object.__setattr__(self, name, freeze(getattr(self, name)))

    def __reduce__(self) -> tuple[Any, ...]:
        evidence, axes = (tuple(thaw(part)) for part in (self.evidence, self.axes))
        return (Verdict, (self.sentence, evidence, self.code, tuple(self.next_steps), axes))

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
    sequences reach; for a collapse, a float floor, a zero stream and NaN, one sequence is enough. The sentence says how
    many sequences are affected, at which depth the state starts, where it is worst and whether it ends. Of a run at
    several lengths, the longest is judged.

    Args:
        table: rows of a run. The status of a value, not its size, says that it is at the float floor.
        null: per metric ``{"mean", "sd", "draws"}`` over same-shape random tokens.
        floor_relative: relative residual at which the format shows only rounding, to print; None if unknown.
        lengths: by stack, the number of tokens of each sequence.
        dim: width of the stream.
        model: name of the model on the command line, for the next steps.
    """
    table = at_longest(within_sequences(table))
    lost = first_not_finite(table)
    finite = _judge_finite(table, null or {}, floor_relative, lengths or {}, dim, model)
    if lost is None:
        return finite
    others = () if finite.code == State.UNKNOWN.code else finite.evidence
    words = beside_not_finite(lost, finite.sentence if others else "")
    return Verdict(words, (lost.evidence(), *others), CODE, steps_for(State.NOT_FINITE, model))


def beside_not_finite(lost: Lost, sentence: str) -> str:
    """Where a run is not finite, and what holds elsewhere."""
    return f"{lost} Where it is finite: {sentence[:1].lower()}{sentence[1:]}" if sentence else str(lost)


def _judge_finite(
    table: pa.Table,
    null: Mapping[str, Any],
    floor_relative: float | None,
    lengths: Mapping[str | None, Mapping[int, int]],
    dim: int | None,
    model: str | None,
) -> Verdict:
    readings: dict[str | None, StackReading] = {}
    for stack in stacks_of(table):
        battery = read_battery(table, stack, lengths=lengths.get(stack), dim=dim)
        if battery is not None:
            readings[stack] = read_stack(battery, floor_relative, null)
    if not readings:
        wanted = ", ".join(names[0] for part, names in PARTS.items() if part != "size")
        return Verdict(f"No verdict: none of the metrics it is drawn from was measured ({wanted}).", (), "unknown")
    words = [
        f"{str(stack).capitalize()}: {sentence_for(reading)}" if len(readings) > 1 else sentence_for(reading)
        for stack, reading in readings.items()
    ]
    words.append(not_excluded(list(readings.values())))
    words.append(undecided(table, readings))
    gravest = max(reading.state for reading in readings.values())
    evidence = tuple(item for stack, reading in readings.items() for item in _evidence(reading, stack))
    return Verdict(" ".join(words).strip(), evidence, gravest.code, steps_for(gravest, model))


def undecided(table: pa.Table, readings: Mapping[str | None, StackReading]) -> str:
    """A sentence if a threshold of the table of states lies inside the interval of an estimate; else nothing.

    The estimate itself decides the state. The exact value may lie on the other side of the threshold.
    """
    counts: dict[str, int] = {}
    for stack, reading in readings.items() if INTERVAL[0] in table.column_names else ():
        here = only(of_stack(table, stack), site=reading.battery.site)
        for part, threshold in (("centred_dimension", NARROW_DIMENSION), ("directions", FEW_DIRECTIONS)):
            name = reading.battery.played_by.get(part)
            rows = only(here, metric=name) if name else here.slice(0, 0)
            low, high = (rows[end].to_numpy() for end in INTERVAL)
            words = f"{name} at {threshold:g}"
            counts[words] = counts.get(words, 0) + int(((low <= threshold) & (threshold <= high)).sum())
    open_ones = [f"{words} in {count} of the values" for words, count in counts.items() if count]
    if not open_ones:
        return ""
    return (
        "Not decided, because the threshold lies inside the interval of an estimate: whether the tokens differ along a "
        f"few directions only ({', '.join(open_ones)}); spectra='exact' decides."
    )


def _evidence(reading: StackReading, stack: str | None) -> list[dict[str, Any]]:
    """The values cited by the sentence, including those about other sequences; call it after building the sentence."""
    counted = {"sequences": int(reading.members.sum()), "of_sequences": reading.total}
    own = [{**entry, **counted} for entry in reading.cited_values(stack)]
    if not own and reading.state is not State.UNKNOWN:
        own = [{"code": reading.state.code, "site": reading.battery.site, "stack": stack, **counted}]
    return own + [item for beside in reading.besides for item in _evidence(beside, stack)]
