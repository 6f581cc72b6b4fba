"""The input of a sentence: the states of the sequences of one stack, and the state they are named after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.verdicts.battery import Battery, Flags, Floats
from rankscope.verdicts.classifying import Trend, classify, headline, overall, segments, trends
from rankscope.verdicts.states import MAJORITY, State
from rankscope.views import number

BESIDE_NULL = ("spread", "centred_dimension")
SEEN_OR_NOT = (State.COLLAPSED, State.FLOOR)


@dataclass(frozen=True, eq=False)
class StackReading:
    """The sequences of one stack; collects the values that a sentence cites.

    Attributes:
        battery: their values.
        states: ``(layers, sequences)``.
        trends: trend of each sequence whose residual falls steadily.
        state: the state they are named after.
        members: which sequences are in that state at some layer.
        total: number of sequences of the run.
        floor_relative: the float floor, to print.
        null: values of random tokens, to print.
        besides: readings of what is not in that state: other sequences or other blocks.
        cited: part and row of every value in the sentence.
    """

    battery: Battery
    states: NDArray[np.int64]
    trends: list[Trend | None]
    state: State
    members: Flags
    total: int
    floor_relative: float | None
    null: Mapping[str, Any]
    besides: list[StackReading] = field(default_factory=list)
    cited: list[tuple[str, int]] = field(default_factory=list)

    @property
    def is_everywhere(self) -> bool:
        """Whether all sequences are in the state."""
        return bool(self.members.all())

    def rows(self, *states: State) -> list[int]:
        """Layers at which half of the members are in one of ``states``; if there are none, at which any member is."""
        held = np.isin(self.states[:, self.members], [int(state) for state in states])
        for needed in (0.5 * held.shape[1], 1):
            numbers = np.flatnonzero(held.sum(axis=1) >= max(needed, 1)).tolist()
            if numbers:
                return [int(row) for row in numbers]
        return []

    def those(self, row: int) -> Flags:
        """The sequences a value at this row is about: the members that are in the state there, else all members."""
        held = self.members & np.isin(self.states[row], [int(state) for state in self._own_states])
        return held if row in self.rows(*self._own_states) else self.members

    @property
    def _own_states(self) -> tuple[State, ...]:
        return SEEN_OR_NOT if self.state in SEEN_OR_NOT else (self.state,)

    def value(self, part: str, row: int) -> float:
        """Mean over the sequences, as in every table; median over those that are meant if these are not all."""
        those = self.those(row) if self.state.is_grave else self.members
        known = self.battery.values[part][row, those]
        known = known[np.isfinite(known)]
        if not known.size:
            return math.nan
        return float(known.mean() if those.all() else np.median(known))

    def cited_values(self, stack: str | None) -> list[dict[str, Any]]:
        """The values in the sentence, as entries of a verdict's evidence; call it after building the sentence."""
        battery = self.battery
        return [
            {
                "code": self.state.code,
                "metric": battery.played_by[part],
                "site": battery.site,
                "stack": stack,
                "layer": int(battery.layers[row]),
                "value": self.value(part, row),
            }
            for part, row in self.cited
        ]

    def line(self, part: str) -> Floats:
        """:meth:`value` over depth."""
        return np.array([self.value(part, row) for row in range(self.battery.layers.size)])

    def spread(self) -> Floats:
        """The relative residual over depth, or the typical one if only that was measured."""
        return self.line("spread" if "spread" in self.battery.played_by else "typical")

    def cite(self, part: str, row: int, *, beside_null: bool = True) -> str | None:
        """``metric value`` for the sentence, recorded as evidence; None if it is unknown."""
        value = self.value(part, row)
        if part not in self.battery.played_by or math.isnan(value):
            return None
        if (part, row) not in self.cited:
            self.cited.append((part, row))
        name = self.battery.played_by[part]
        reference = self.null.get(name) if beside_null and part in BESIDE_NULL else None
        beside = f", same-shape random {number(float(reference['mean']))}" if reference else ""
        return f"{name.replace('_', ' ')} {number(value)}{beside}"

    def metric(self, part: str, row: int) -> str | None:
        """The metric that measures a part, in words; its value is recorded as evidence. None if it is unknown."""
        return self.battery.played_by[part].replace("_", " ") if self.cite(part, row) else None

    def name(self, row: int, part: str) -> str:
        """The metric in brackets, after its value was said in words; empty if it is unknown."""
        name = self.metric(part, row)
        if name is None:
            return ""
        reference = self.null.get(self.battery.played_by[part]) if part in BESIDE_NULL else None
        beside = f"; same-shape random {number(float(reference['mean']))}" if reference else ""
        return f" ({name}{'' if self._is_about_all(row) else ', median of those'}{beside})"

    def _is_about_all(self, row: int) -> bool:
        return bool((self.those(row) if self.state.is_grave else self.members).all())

    def cite_all(self, row: int, *parts: str) -> str:
        """Several parts in brackets, without unknown ones."""
        citations = [words for part in parts if (words := self.cite(part, row))]
        whose = "" if self._is_about_all(row) else "median of those: "
        return f" ({whose}{'; '.join(citations)})" if citations else ""

    def worst(self, part: str, rows: list[int], *, highest: bool) -> int:
        """The row among ``rows`` with the extreme value of a part; the last one if it is unknown."""
        values = {row: self.value(part, row) for row in rows}
        known = [row for row in rows if not math.isnan(values[row])]
        if not known:
            return rows[-1]
        return max(known, key=lambda row: values[row] if highest else -values[row])

    def block(self, row: int) -> str:
        """``block 11 (of 0-11)``."""
        layers = self.battery.layers
        return f"block {layers[row]} (of {layers[0]}-{layers[-1]})" if layers.size > 1 else f"block {layers[row]}"

    def count(self) -> str:
        """``in 3 of 8 sequences ``; empty if all are meant."""
        return "" if self.is_everywhere else f"in {int(self.members.sum())} of {self.total} sequences "

    def span(self, *states: State) -> str:
        """Where over depth the states hold: ``in every block``, ``from block 3 on``, ``in blocks 12-24``."""
        chosen = self.rows(*states)
        held = np.isin(self.states[chosen][:, self.members], [int(state) for state in states])
        least = held.mean(axis=1).min(initial=1.0) if held.size else 1.0
        whose = "the sequences" if self.is_everywhere else "these"
        share = f" (in half of {whose} or more)" if least >= MAJORITY else f" (in some of {whose})"
        return span_of(chosen, self.battery.layers) + ("" if least == 1.0 else share)


def span_of(rows: Sequence[int], layers: NDArray[np.int64]) -> str:
    """Where rows are among all layers, in words.

    Example:
        >>> layers = np.arange(6)
        >>> span_of([0, 1, 2, 3, 4, 5], layers), span_of([4, 5], layers), span_of([1, 3], layers)
        ('in every block', 'from block 4 on', 'in blocks 1, 3')
    """
    end = layers.size - 1
    grouped = [State.COLLAPSED if row in rows else State.UNKNOWN for row in range(end + 1)]
    parts = [piece for piece in segments(grouped) if piece.state == State.COLLAPSED]
    if len(parts) == 1 and parts[0].last == end:
        if parts[0].first == end:
            return f"in the last block ({layers[end]})" if end > 0 else f"in block {layers[end]}"
        return "in every block" if parts[0].first == 0 else f"from block {layers[parts[0].first]} on"
    names = [f"{layers[p.first]}-{layers[p.last]}" if p.last > p.first else str(layers[p.first]) for p in parts]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more spans" if len(names) > 3 else "")
    return f"in block {shown}" if len(names) == 1 and "-" not in names[0] else f"in blocks {shown}"


def read_stack(
    battery: Battery, floor_relative: float | None, null: Mapping[str, Any], states: NDArray[np.int64] | None = None
) -> StackReading:
    """Name the sequences of a battery after a state, and keep a reading of those not in it.

    With a zero stream, the other blocks are read as well; with a collapse in some sequences, the other sequences.
    """
    states = classify(battery) if states is None else states
    falling = trends(battery, states)
    by_sequence = overall(states, falling)
    state = headline(by_sequence)
    members = _members(states, falling, by_sequence, state)
    reading = StackReading(battery, states, falling, state, members, members.size, floor_relative, null)
    if state is State.VANISHED:
        rest = np.where(states == State.VANISHED, int(State.UNKNOWN), states)
        if rest.any():
            reading.besides.append(read_stack(battery, floor_relative, null, rest))
    elif state.is_grave and not members.all():
        reading.besides.append(read_stack(battery.of_sequences(~members), floor_relative, null, states[:, ~members]))
    return reading


def _members(
    states: NDArray[np.int64], falling: list[Trend | None], by_sequence: NDArray[np.int64], state: State
) -> Flags:
    if state in SEEN_OR_NOT:
        return np.isin(by_sequence, [int(one) for one in SEEN_OR_NOT])
    if state is State.COLLAPSING:
        return np.array([one is not None for one in falling], dtype=np.bool_)
    members: Flags = (states == state).any(axis=0)
    if state is State.HEALTHY:
        members = np.ones(states.shape[1], dtype=np.bool_)
    return members
