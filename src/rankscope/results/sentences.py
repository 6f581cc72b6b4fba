"""The words of a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.results.battery import Battery
from rankscope.results.lookalikes import SHARED_RESIDUAL, State, segments, spread_of
from rankscope.results.text import number

LOOKALIKES: Mapping[str, str] = {
    "token_share": "one huge token",
    "channel_share": "one huge channel",
    "centred_dimension": "few directions",
}

BESIDES: Mapping[State, tuple[str, str]] = {
    State.HUGE_TOKEN: ("token_share", "one huge token"),
    State.HUGE_CHANNEL: ("channel_share", "one huge channel"),
    State.NARROW: ("centred_dimension", "few directions"),
    State.MEAN_OFFSET: ("spread", "a large common vector"),
}
BESIDE_NULL = ("spread", "centred_dimension")


@dataclass(frozen=True, eq=False)
class Reading:
    """What a sentence is made from; collects what it cites."""

    battery: Battery
    by_layer: list[State]
    overall: State
    floor_relative: float | None
    null: Mapping[str, Any]
    minority: tuple[int, int]
    cited: list[tuple[str, int]] = field(default_factory=list)

    def spread(self) -> NDArray[np.float64]:
        """Mean over sequences of the relative residual by layer, as in every table."""
        grid = spread_of(self.battery)
        return np.array([row[np.isfinite(row)].mean() if np.isfinite(row).any() else np.nan for row in grid])

    def rows(self, *states: State) -> list[int]:
        """Rows of the battery in one of ``states``."""
        return [row for row, state in enumerate(self.by_layer) if state in states]

    def cite(self, part: str, row: int, *, beside_null: bool = True) -> str | None:
        """``metric value`` for the sentence, remembered as evidence; None where it is unknown."""
        value = self.battery.mean(part, row)
        if part not in self.battery.played_by or math.isnan(value):
            return None
        if (part, row) not in self.cited:
            self.cited.append((part, row))
        name = self.battery.played_by[part]
        reference = self.null.get(name) if beside_null and part in BESIDE_NULL else None
        beside = f", same-shape random {number(float(reference['mean']))}" if reference else ""
        return f"{name.replace('_', ' ')} {number(value)}{beside}"

    def cite_all(self, row: int, *parts: str) -> str:
        """Several parts in brackets, unknown ones left out."""
        found = [words for part in parts if (words := self.cite(part, row))]
        return f" ({'; '.join(found)})" if found else ""

    def worst(self, part: str, rows: list[int], *, highest: bool) -> int:
        """The row among ``rows`` with the extreme value of a part; the last one where it is unknown."""
        values = {row: self.battery.mean(part, row) for row in rows}
        known = [row for row in rows if not math.isnan(values[row])]
        if not known:
            return rows[-1]
        return max(known, key=lambda row: values[row] if highest else -values[row])

    def block(self, row: int) -> str:
        """``block 11 (of 0-11)``."""
        layers = self.battery.layers
        return f"block {layers[row]} (of {layers[0]}-{layers[-1]})" if layers.size > 1 else f"block {layers[row]}"

    def span(self, *states: State) -> str:
        """Where over depth the states hold: ``in every block``, ``from block 3 on``, ``in blocks 12-24``."""
        grouped = [State.COLLAPSED if state in states else State.UNKNOWN for state in self.by_layer]
        parts = [piece for piece in segments(grouped) if piece.state == State.COLLAPSED]
        layers, end = self.battery.layers, len(self.by_layer) - 1
        if len(parts) == 1 and parts[0].last == end:
            if parts[0].first == end:
                return f"in the last block ({layers[end]})" if end > 0 else f"in block {layers[end]}"
            return "in every block" if parts[0].first == 0 else f"from block {layers[parts[0].first]} on"
        names = [f"{layers[p.first]}-{layers[p.last]}" if p.last > p.first else str(layers[p.first]) for p in parts]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more spans" if len(names) > 3 else "")
        return f"in block {shown}" if len(names) == 1 and "-" not in names[0] else f"in blocks {shown}"


def sentence_for(reading: Reading) -> str:
    """The sentence for the overall state."""
    return _SENTENCES[reading.overall](reading) + _besides(reading) + _minority(reading)


def _collapsed(r: Reading) -> str:
    rows = r.rows(State.COLLAPSED, State.FLOOR)
    row = r.worst("spread", r.rows(State.COLLAPSED), highest=False)
    text = (
        f"Collapsed {r.span(State.COLLAPSED, State.FLOOR)}: at {r.block(row)} the tokens differ from their mean by "
        f"{_percent(r.spread()[row])} of their size{r.cite_all(row, 'spread', 'cosine')}"
    )
    floored = r.rows(State.FLOOR)
    if floored:
        text += f"; {r.span(State.FLOOR)} it meets the {_floor_words(r)} and cannot be followed further"
    return f"{text}.{_afterwards(r, rows)} It tells what the stream looks like, not whether that does harm."


def _at_floor(r: Reading) -> str:
    rows = r.rows(State.FLOOR)
    row = r.worst("spread", rows, highest=True)
    values = [words for words in (r.cite("spread", row), _floor_words(r)) if words]
    return (
        f"At the float floor, cannot tell: {r.span(State.FLOOR)} the tokens agree to the last digits the format "
        f"keeps ({'; '.join(values)}); they collapsed at least that far, and how much further "
        f"this precision cannot show. Measure in float64.{_afterwards(r, rows)}"
    )


def _huge_token(r: Reading) -> str:
    row = r.worst("token_share", r.rows(State.HUGE_TOKEN), highest=True)
    share = r.battery.mean("token_share", row)
    text = (
        f"One huge token: {r.span(State.HUGE_TOKEN)} a single token carries {_percent(share)} of the energy "
        f"(at {r.block(row)}: {r.cite('token_share', row)})"
    )
    fooled = [words for part in ("spread", "dimension") if (words := r.cite(part, row, beside_null=False))]
    if fooled:
        verb = "speaks" if len(fooled) == 1 else "speak"
        text += f", so {' and '.join(fooled)} there {verb} of that token and not of the others"
    advice = "Leave it out (tokens policy no-first) to see the rest."
    return f"{text}.{_cosine_words(r, row)}{_elsewhere(r, State.HUGE_TOKEN)} {advice}"


def _huge_channel(r: Reading) -> str:
    row = r.worst("channel_share", r.rows(State.HUGE_CHANNEL), highest=True)
    share = r.battery.mean("channel_share", row)
    fooled = r.cite("dimension", row)
    text = (
        f"One huge channel: {r.span(State.HUGE_CHANNEL)} a single channel carries {_percent(share)} of the "
        f"energy (at {r.block(row)}: {r.cite('channel_share', row)})"
    )
    text += f", so {fooled} there speaks of that channel" if fooled else ""
    shared = r.spread()[row] <= SHARED_RESIDUAL
    differ = "most of what the tokens hold is common to them" if shared else "the tokens still differ"
    return f"{text}; {differ}{r.cite_all(row, 'spread', 'cosine')}.{_elsewhere(r, State.HUGE_CHANNEL)}"


def _mean_offset(r: Reading) -> str:
    row = r.worst("spread", r.rows(State.MEAN_OFFSET), highest=False)
    common = 1.0 - float(r.spread()[row]) ** 2
    text = (
        f"Mean offset, not collapse: {r.span(State.MEAN_OFFSET)} the tokens share a large common vector; "
        f"at {r.block(row)} it carries {_percent(common)} of the energy{r.cite_all(row, 'spread', 'cosine')}"
    )
    around = r.cite("centred_dimension", row)
    text += f", while around it they stay apart ({around})" if around else ""
    return f"{text}.{_elsewhere(r, State.MEAN_OFFSET)}"


def _narrow(r: Reading) -> str:
    row = r.worst("centred_dimension", r.rows(State.NARROW), highest=False)
    return (
        f"Few directions: {r.span(State.NARROW)} the tokens differ along little more than a line (at {r.block(row)}: "
        f"{r.cite('centred_dimension', row)}){r.cite_all(row, 'spread', 'cosine')}.{_elsewhere(r, State.NARROW)}"
    )


def _healthy(r: Reading) -> str:
    spread = r.spread()
    checks = [
        words
        for part in ("token_share", "channel_share")
        if (words := r.cite(part, r.worst(part, list(range(len(r.by_layer))), highest=True)))
    ]
    tail = f" No token or channel dominates (at most {'; '.join(checks)})." if checks else ""
    if not np.isfinite(spread).any():
        return f"No sign of collapse in what was measured.{tail}"
    low = int(np.nanargmin(spread))
    name = r.cite("spread", low) or r.cite("cosine", low)
    first, last = (int(np.flatnonzero(np.isfinite(spread))[end]) for end in (0, -1))
    begin, end = _percent(spread[first]), _percent(spread[last])
    course = f", from {begin} at block {r.battery.layers[first]} to {end} at the last" if begin != end else ""
    return (
        f"No collapse: at {r.block(low)}, the lowest, the tokens differ from their mean by {_percent(spread[low])} of "
        f"their size ({name}){course}.{tail}"
    )


def _unknown(r: Reading) -> str:
    return f"No verdict: every value at {r.battery.site} is undefined or not finite."


_SENTENCES: Mapping[State, Callable[[Reading], str]] = {
    State.UNKNOWN: _unknown,
    State.HEALTHY: _healthy,
    State.MEAN_OFFSET: _mean_offset,
    State.NARROW: _narrow,
    State.HUGE_CHANNEL: _huge_channel,
    State.HUGE_TOKEN: _huge_token,
    State.COLLAPSED: _collapsed,
    State.FLOOR: _at_floor,
}


def _percent(share: float) -> str:
    value = 100.0 * float(share)
    if value < 0.01:
        return f"{float(share):.1e}"
    if 99.0 < value < 100.0:
        return f"{value:.1f}%" if value < 99.95 else ">99.9%"
    return f"{value:.0f}%" if value >= 9.95 else f"{value:.2g}%"


def _floor_words(r: Reading) -> str:
    return "float floor" if r.floor_relative is None else f"float floor {number(r.floor_relative)}"


def _afterwards(r: Reading, rows: list[int]) -> str:
    """Whether the stream spreads again after the last collapsed block."""
    spread, last = r.spread(), len(r.by_layer) - 1
    if rows[-1] == last or not math.isfinite(spread[last]):
        return ""
    text = f" It spreads again to {_percent(spread[last])} at block {r.battery.layers[last]}"
    if r.by_layer[rows[-1]] == State.FLOOR:
        text += ", which may be rounding noise that a norm amplified"
    return f"{text}."


def _elsewhere(r: Reading, state: State) -> str:
    spread = r.spread()
    rows = [row for row, other in enumerate(r.by_layer) if other < state and math.isfinite(spread[row])]
    if not rows:
        return ""
    low, high = min(spread[row] for row in rows), max(spread[row] for row in rows)
    span = _percent(low) if _percent(low) == _percent(high) else f"{_percent(low)} to {_percent(high)}"
    return f" Elsewhere the tokens differ from their mean by {span} of their size."


def _cosine_words(r: Reading, row: int) -> str:
    words = r.cite("cosine", row)
    if words is None:
        return ""
    apart = r.battery.mean("cosine", row) < 1.0 - SHARED_RESIDUAL**2
    return (
        f" The {words}, which weighs all tokens alike, shows the others {'apart' if apart else 'leaning the same way'}."
    )


def _besides(r: Reading) -> str:
    """Milder states in other blocks; a common vector on the way into collapse goes without saying."""
    collapsed = r.overall >= State.COLLAPSED
    found = []
    for state, (part, words) in BESIDES.items():
        rows = r.rows(state)
        if rows and state < r.overall and not (collapsed and state == State.MEAN_OFFSET):
            row = r.worst(part, rows, highest=part.endswith("share"))
            found.append(f" Also {words} {r.span(state)}{r.cite_all(row, part)}.")
    return "".join(found)


def _minority(r: Reading) -> str:
    count, total = r.minority
    return f" Yet {count} of {total} sequences collapse somewhere." if count else ""


def not_excluded(readings: Sequence[Reading]) -> str:
    """What the battery could not exclude because it was not measured."""
    settled = (State.COLLAPSED, State.FLOOR, State.UNKNOWN, State.HUGE_TOKEN)
    open_ones = [reading for reading in readings if reading.overall not in settled]
    missing = [words for part, words in LOOKALIKES.items() if any(part not in r.battery.played_by for r in open_ones)]
    return f"Not measured, so not excluded: {', '.join(missing)}." if missing else ""
