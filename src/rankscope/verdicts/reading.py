"""The input of a sentence: the states of the sequences of one stack, and the state they are named after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.verdicts.battery import Battery, Flags, Floats
from rankscope.verdicts.classifying import Trend, classify, headline, overall, trends
from rankscope.verdicts.states import MAJORITY, State

SEEN_OR_NOT = (State.COLLAPSED, State.FLOOR)


@dataclass(frozen=True, eq=False)
class StackReading:
    """The sequences of one stack; collects the values that the sentences cite.

    Attributes:
        battery: their values.
        states: ``(layers, sequences)``.
        trends: trend of each sequence whose residual falls steadily.
        state: the state they are named after.
        members: which sequences are in that state at some layer.
        besides: readings of what is not in that state: other sequences or other blocks.
        cited: part and row of every value behind the sentences.
    """

    battery: Battery
    states: NDArray[np.int64]
    trends: list[Trend | None]
    state: State
    members: Flags
    besides: list[StackReading] = field(default_factory=list)
    cited: list[tuple[str, int]] = field(default_factory=list)

    @property
    def is_everywhere(self) -> bool:
        """Whether all sequences are in the state."""
        return bool(self.members.all())

    @property
    def spread_part(self) -> str:
        """The relative residual, or the typical one if only that was measured."""
        return "spread" if "spread" in self.battery.played_by else "typical"

    @property
    def _own_states(self) -> tuple[State, ...]:
        return SEEN_OR_NOT if self.state in SEEN_OR_NOT else (self.state,)

    def rows(self, *states: State) -> list[int]:
        """Layers at which half of the members are in one of ``states``; if there are none, at which any member is."""
        held = np.isin(self.states[:, self.members], states).sum(axis=1)
        for needed in (max(MAJORITY * self.members.sum(), 1), 1):
            numbers: list[int] = np.flatnonzero(held >= needed).tolist()
            if numbers:
                return numbers
        return []

    def value(self, part: str, row: int) -> float:
        """Mean over the sequences, as in every table; median over those that are meant if these are not all.

        Of a grave state, those that are in it at this row are meant; otherwise all members.
        """
        those = self.members
        if self.state.is_grave and row in self.rows(*self._own_states):
            those = those & np.isin(self.states[row], self._own_states)
        known = self.battery.values[part][row, those]
        known = known[np.isfinite(known)]
        if not known.size:
            return math.nan
        return float(known.mean() if those.all() else np.median(known))

    def cite(self, part: str, row: int) -> float:
        """The value, recorded as evidence; NaN if it is unknown."""
        value = self.value(part, row)
        known = part in self.battery.played_by and not math.isnan(value)
        if known and (part, row) not in self.cited:
            self.cited.append((part, row))
        return value if known else math.nan

    def cited_values(self, stack: str | None) -> list[dict[str, Any]]:
        """The values behind the sentences, as entries of a verdict's evidence; call it after writing the sentences."""
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

    def worst(self, part: str, rows: Sequence[int], *, highest: bool = False) -> int:
        """The row among ``rows`` with the extreme value of a part; the last one if it is unknown."""
        values = {row: self.value(part, row) for row in rows}
        known = [row for row in rows if not math.isnan(values[row])]
        if not known:
            return rows[-1]
        return max(known, key=lambda row: values[row] if highest else -values[row])

    def count(self) -> str:
        """``in 3 of 8 sequences``; empty if all are meant."""
        return "" if self.is_everywhere else f"in {int(self.members.sum())} of {self.members.size} sequences"

    def span(self, *states: State) -> str:
        """Where over depth the states hold: ``in every block``, ``from block 3 on``, ``in blocks 12-24``."""
        chosen = self.rows(*states)
        held = np.isin(self.states[chosen][:, self.members], states)
        least = held.mean(axis=1).min(initial=1.0) if held.size else 1.0
        whose = "the sequences" if self.is_everywhere else "these"
        share = f" (in half of {whose} or more)" if least >= MAJORITY else f" (in some of {whose})"
        return span_of(chosen, self.battery.layers) + ("" if least == 1.0 else share)

    def where(self, *states: State) -> str:
        """In which sequences and over which blocks the states hold; of the state itself, without an argument."""
        return ", ".join(filter(None, (self.count(), self.span(*(states or (self.state,))))))


def span_of(rows: Sequence[int], layers: NDArray[np.int64]) -> str:
    """Where rows are among all layers, in words.

    Example:
        >>> layers = np.arange(6)
        >>> span_of([0, 1, 2, 3, 4, 5], layers), span_of([4, 5], layers), span_of([1, 3], layers)
        ('in every block', 'from block 4 on', 'in blocks 1, 3')
    """
    places = np.asarray(sorted(rows), dtype=np.int64)
    runs = [run for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if run.size]
    end = layers.size - 1
    if len(runs) == 1 and runs[0][-1] == end:
        start = int(runs[0][0])
        if start == end:
            return f"in the last block ({layers[end]})" if end > 0 else f"in block {layers[end]}"
        return "in every block" if start == 0 else f"from block {layers[start]} on"
    names = [f"{layers[run[0]]}-{layers[run[-1]]}" if run.size > 1 else str(layers[run[0]]) for run in runs]
    shown = ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more spans"
    return f"in block {shown}" if len(names) == 1 and "-" not in names[0] else f"in blocks {shown}"


def read_stack(battery: Battery, states: NDArray[np.int64] | None = None) -> StackReading:
    """Name the sequences of a battery after a state, and keep a reading of those not in it.

    With a zero stream, the other blocks are read as well; with a collapse in some sequences, the other sequences.
    """
    states = classify(battery) if states is None else states
    falling = trends(battery, states)
    by_sequence = overall(states, falling)
    state = headline(by_sequence)
    if state in SEEN_OR_NOT:
        members: Flags = np.isin(by_sequence, SEEN_OR_NOT)
    elif state is State.COLLAPSING:
        members = np.array([one is not None for one in falling], dtype=np.bool_)
    elif state is State.HEALTHY:
        members = np.ones(states.shape[1], dtype=np.bool_)
    else:
        members = (states == state).any(axis=0)
    reading = StackReading(battery, states, falling, state, members)
    if state is State.VANISHED:
        rest = np.where(states == State.VANISHED, int(State.UNKNOWN), states)
        if rest.any():
            reading.besides.append(read_stack(battery, rest))
    elif state.is_grave and not members.all():
        reading.besides.append(read_stack(battery.of_sequences(~members), states[:, ~members]))
    return reading


def steady(reading: StackReading) -> tuple[float, int]:
    """Factor per block of the sequences whose residual falls, and the block at which it crosses the threshold."""
    known = [trend for trend in reading.trends if trend is not None]
    return float(np.median([trend.factor for trend in known])), int(np.median([trend.crossing for trend in known]))


__all__ = ["SEEN_OR_NOT", "Floats", "StackReading", "read_stack", "span_of", "steady"]
