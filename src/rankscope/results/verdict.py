"""One sentence about a run, drawn from the battery, with its evidence named. Never a single health score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rankscope.results._frozen import freeze, thaw
from rankscope.results.battery import PARTS, Battery, read_battery
from rankscope.results.lookalikes import State, classify, layer_states
from rankscope.results.not_finite import CODE, first_not_finite
from rankscope.results.sentences import Reading, not_excluded, sentence_for
from rankscope.results.summary import stacks_of

GRAVITY = (*(state for state in State if state < State.COLLAPSED), State.FLOOR, State.COLLAPSED)
"""Milder to graver for a whole run: seen collapse outranks a floor behind which nothing can be seen."""


@dataclass(frozen=True)
class Verdict:
    """What the battery says.

    Args:
        sentence: plain words with the values they rest on.
        evidence: those values: code, metric, site, stack, layer, value.
        code: ``"healthy"``, ``"mean offset"``, ``"narrow"``, ``"huge channel"``, ``"huge token"``, ``"floor"``,
            ``"collapsed"``, ``"not finite"`` or ``"unknown"``.
    """

    sentence: str
    evidence: tuple[Mapping[str, Any], ...]
    code: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "evidence", freeze(self.evidence))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Verdict, (self.sentence, tuple(thaw(self.evidence)), self.code))

    def __str__(self) -> str:
        return self.sentence


def judge(table: pa.Table, floor_relative: float | None, null: Mapping[str, Any] | None = None) -> Verdict:
    """Draw a verdict from whatever part of the battery is in ``table``. Heuristic: the thresholds are conventions.

    Each stack is judged by itself. A layer has the gravest state that half of its sequences reached, and the sentence
    tells where over depth the state starts, where it is worst and whether it ends.

    Args:
        table: rows of a run.
        floor_relative: relative residual at which the format shows only rounding, e.g. 4.8e-7 for float32; None when it
            is not known.
        null: per metric ``{"mean", "sd", "draws"}`` over same-shape random tokens.
    """
    lost = first_not_finite(table)
    if lost is not None:
        rest = _judge_finite(table, floor_relative, null)
        others = () if rest.code == "unknown" else rest.evidence
        words = f"{lost} Where it is finite: {rest.sentence[:1].lower()}{rest.sentence[1:]}" if others else str(lost)
        return Verdict(words, (lost.evidence(), *others), CODE)
    return _judge_finite(table, floor_relative, null)


def _judge_finite(table: pa.Table, floor_relative: float | None, null: Mapping[str, Any] | None) -> Verdict:
    readings = {}
    for stack in stacks_of(table):
        battery = read_battery(table, stack)
        if battery is not None:
            readings[stack] = _read(battery, floor_relative, null or {})
    if not readings:
        wanted = ", ".join(names[0] for names in PARTS.values())
        return Verdict(f"No verdict: none of the metrics it is drawn from was measured ({wanted}).", (), "unknown")
    words = [
        f"{str(stack).capitalize()}: {sentence_for(reading)}" if len(readings) > 1 else sentence_for(reading)
        for stack, reading in readings.items()
    ]
    words.append(not_excluded(list(readings.values())))
    gravest = max((reading.overall for reading in readings.values()), key=GRAVITY.index)
    evidence = tuple(item for stack, reading in readings.items() for item in _evidence(reading, stack))
    return Verdict(" ".join(words).strip(), evidence, gravest.code)


def _read(battery: Battery, floor_relative: float | None, null: Mapping[str, Any]) -> Reading:
    states = classify(battery, floor_relative)
    by_layer = layer_states(states)
    overall = max(by_layer, key=GRAVITY.index)
    return Reading(battery, by_layer, overall, floor_relative, null, _minority(states, overall))


def _evidence(reading: Reading, stack: str | None) -> list[dict[str, Any]]:
    """What the sentence cited; call it after the sentence was made."""
    battery = reading.battery
    return [
        {
            "code": reading.overall.code,
            "metric": battery.played_by[part],
            "site": battery.site,
            "stack": stack,
            "layer": int(battery.layers[row]),
            "value": battery.mean(part, row),
        }
        for part, row in reading.cited
    ]


def _minority(states: NDArray[np.int64], overall: State) -> tuple[int, int]:
    """How many sequences of how many collapse somewhere although the layers as a whole do not."""
    if overall in (State.COLLAPSED, State.FLOOR):
        return 0, states.shape[1]
    return int((states >= State.COLLAPSED).any(axis=0).sum()), states.shape[1]
