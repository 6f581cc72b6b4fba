"""The sentences of a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rankscope.verdicts.reading import SEEN_OR_NOT, StackReading
from rankscope.verdicts.states import COLLAPSED_RESIDUAL, SHARED_RESIDUAL, State
from rankscope.views import number

LOOKALIKES: Mapping[str, str] = {
    "token_share": "one huge token",
    "channel_share": "one huge channel",
    "centred_dimension": "few directions",
    "cluster_share": "copies of one token",
}

BESIDES: Mapping[State, tuple[str, str]] = {
    State.COPIES: ("cluster_share", "copies of one token"),
    State.CLUSTERS: ("distinct", "clusters of copies"),
    State.SAME_DIRECTION: ("direction", "one common direction"),
    State.HUGE_TOKEN: ("token_share", "one huge token"),
    State.HUGE_CHANNEL: ("channel_share", "one huge channel"),
    State.FEW_DIRECTIONS: ("centred_dimension", "few directions"),
    State.MEAN_OFFSET: ("spread", "a large common vector"),
}
"""Milder states that are mentioned after a more severe one: the part that is cited, and the words."""

ON_THE_WAY = (State.MEAN_OFFSET, State.SAME_DIRECTION, State.CLUSTERS, State.COPIES, State.FEW_DIRECTIONS)
"""States that tokens pass through on their way to being equal; not mentioned if the tokens collapse."""

MOSTLY = 3.0
"""Tokens differ mostly in norm if their relative residual is at least this many times that of their directions: then
at most a ninth of what differs, in energy, is in the directions."""

HARM = "This describes the activations; whether it hurts depends on your task."


def sentence_for(reading: StackReading) -> str:
    """The sentence for the state of a reading, followed by additional remarks."""
    return _SENTENCES[reading.state](reading) + _besides(reading) + _minority(reading) + _rest(reading)


def _collapsed(r: StackReading) -> str:
    rows = r.rows(*SEEN_OR_NOT)
    seen = r.rows(State.COLLAPSED)
    row = r.worst("spread", [row for row in seen if row in rows] or seen, highest=False)
    r.cite("cosine", row)
    text = (
        f"Collapsed {r.count()}{r.span(*SEEN_OR_NOT)}: the tokens of a sequence become nearly equal; at {r.block(row)} "
        f"they differ from their mean by {percent(r.spread()[row])} of their size{r.name(row, 'spread')}"
        f"{_course(r, rows)}"
    )
    if r.rows(State.FLOOR):
        text += f"; {r.span(State.FLOOR)} it reaches the {_floor_words(r)}, below which it cannot be measured"
    return f"{text}.{_afterwards(r, rows)} {HARM}"


def _at_floor(r: StackReading) -> str:
    rows = r.rows(State.FLOOR)
    r.cite("spread", r.worst("spread", rows, highest=True))
    return (
        f"At the float floor, cannot tell how far: {r.count()}{r.span(State.FLOOR)} the tokens agree to the last digit "
        f"of their format ({_floor_words(r)}), so they have collapsed at least that far. Measure in float64."
        f"{_afterwards(r, rows)}"
    )


def _vanished(r: StackReading) -> str:
    return (
        f"Vanished: {r.count()}{r.span(State.VANISHED)} the stream is exactly zero, so relative residuals are "
        "undefined."
    )


def _collapsing(r: StackReading) -> str:
    trends = [trend for trend, member in zip(r.trends, r.members, strict=True) if trend is not None and member]
    factor, first, last = (float(np.median([getattr(t, name) for t in trends])) for name in ("factor", "first", "last"))
    crossing = int(np.median([trend.crossing for trend in trends]))
    layers, part = r.battery.layers, "spread" if "spread" in r.battery.played_by else "typical"
    name = r.battery.played_by.get(part, "relative_residual").replace("_", " ")
    r.cite(part, 0)
    r.cite(part, layers.size - 1)
    return (
        f"Collapsing: {r.count()}the tokens become alike block by block, and at this rate count as collapsed at block "
        f"{crossing}. Their {name} falls by a factor of {factor:.2f} per block over the second half of the blocks, "
        f"from {number(first)} at block {layers[0]} to {number(last)} at block {layers[-1]}. {HARM}"
    )


def _copies(r: StackReading) -> str:
    row = r.worst("cluster_share", r.rows(State.COPIES), highest=True)
    share = r.value("cluster_share", row)
    r.cite("distinct", row)
    text = (
        f"Copies: {r.count()}{r.span(State.COPIES)} many tokens are copies of one: at {r.block(row)}, {percent(share)} "
        f"of them are within {percent(COLLAPSED_RESIDUAL)} of one vector{r.name(row, 'cluster_share')}"
    )
    other = r.metric("spread", row)
    return f"{text}. {f'The {other} describes only the others. ' if other else ''}{HARM}"


def _clusters(r: StackReading) -> str:
    row = r.worst("distinct", r.rows(State.CLUSTERS), highest=False)
    count = r.value("distinct", row)
    number_of = f"{round(count)} distinct vectors" if math.isfinite(count) else "few distinct vectors"
    r.cite_all(row, "distinct", "copied_share", "cluster_share", "spread")
    return (
        f"Clusters: {r.count()}{r.span(State.CLUSTERS)} nearly every token is a copy of another; at {r.block(row)} "
        f"there are {number_of}. {HARM}"
    )


def _same_direction(r: StackReading) -> str:
    part = "direction" if "direction" in r.battery.played_by else "cosine"
    row = r.worst(part, r.rows(State.SAME_DIRECTION), highest=part == "cosine")
    r.cite_all(row, "direction", "cosine", "spread")
    return (
        f"Same direction: {r.count()}{r.span(State.SAME_DIRECTION)} the tokens point the same way"
        f"{_norm_words(r, row)}; at {r.block(row)} a typical pair of directions differs by "
        f"{percent(float(_median_direction(r, row)))}{r.name(row, part)}. {HARM}"
    )


def _norm_words(r: StackReading, row: int) -> str:
    """What tells tokens of one direction apart; r² = (part from directions)² + (part from norms)², roughly."""
    spread = r.spread()[row]
    if not math.isfinite(spread):
        return "; whether their norms differ was not measured"
    if spread >= MOSTLY * _median_direction(r, row):
        return " and differ mostly in norm"
    return (
        f", and their norms are nearly equal too: the tokens differ from their mean by {percent(spread)} of their size"
    )


def _huge_token(r: StackReading) -> str:
    row = r.worst("token_share", r.rows(State.HUGE_TOKEN), highest=True)
    share = r.value("token_share", row)
    text = (
        f"One huge token: {r.count()}{r.span(State.HUGE_TOKEN)} a single token carries most of the energy, "
        f"{percent(share)}{r.name(row, 'token_share')} at {r.block(row)}.{_others_words(r, row)}"
    )
    fooled = [words for part in ("spread", "dimension") if (words := r.metric(part, row))]
    if fooled:
        verb = "describes" if len(fooled) == 1 else "describe"
        text += f" There, {' and '.join(fooled)} {verb} the huge token"
        return f"{text}: leave it out (tokens policy no-first) to see the rest."
    return f"{text} Leave it out (tokens policy no-first) to see the rest."


def _huge_channel(r: StackReading) -> str:
    row = r.worst("channel_share", r.rows(State.HUGE_CHANNEL), highest=True)
    share = r.value("channel_share", row)
    text = (
        f"One huge channel: {r.count()}{r.span(State.HUGE_CHANNEL)} a single channel carries most of the energy, "
        f"{percent(share)}{r.name(row, 'channel_share')} at {r.block(row)}. "
    )
    if r.metric("typical", row):
        text += (
            "With it scaled down to the size of the others, a typical pair of tokens differs by "
            f"{percent(r.value('typical', row))} of its size{r.name(row, 'typical')}."
        )
    else:
        shared = r.spread()[row] <= SHARED_RESIDUAL
        differ = "The tokens share most of their energy" if shared else "The tokens still differ"
        text += f"{differ}{r.cite_all(row, 'spread')}."
    r.cite("cosine", row)
    fooled = r.metric("dimension", row)
    return f"{text} There, {fooled} describes the huge channel." if fooled else text


def _mean_offset(r: StackReading) -> str:
    row = r.worst("spread", r.rows(State.MEAN_OFFSET), highest=False)
    common = 1.0 - float(r.spread()[row]) ** 2
    r.cite_all(row, "spread", "cosine")
    text = (
        f"Mean offset, not collapse: {r.count()}{r.span(State.MEAN_OFFSET)} the tokens share a large common vector; "
        f"at {r.block(row)} it carries {percent(common)} of the energy"
    )
    around = r.cite("centred_dimension", row)
    return f"{text}, and around it they stay apart ({around})." if around else f"{text}."


def _few_directions(r: StackReading) -> str:
    part = "centred_dimension" if "centred_dimension" in r.battery.played_by else "directions"
    row = r.worst(part, r.rows(State.FEW_DIRECTIONS), highest=False)
    r.cite_all(row, "spread", "cosine")
    facts = [w for p in ("centred_dimension", "directions") if (w := r.cite(p, row))]
    return (
        f"Few directions: {r.count()}{r.span(State.FEW_DIRECTIONS)} the tokens differ along a few directions only (at "
        f"{r.block(row)}: {'; '.join(facts)})."
    )


def _healthy(r: StackReading) -> str:
    spread = r.spread()
    rows = r.rows(State.HEALTHY)
    checked = [
        name
        for part, name in (("token_share", "token"), ("channel_share", "channel"))
        if r.cite(part, r.worst(part, rows, highest=True))
    ]
    dominated = np.isin(r.states, (int(State.HUGE_TOKEN), int(State.HUGE_CHANNEL))).any()
    tail = f" No {' or '.join(checked)} dominates." if checked and not dominated else ""
    if not np.isfinite(spread).any():
        return f"No sign of collapse in what was measured.{tail}"
    low = int(np.nanargmin(spread))
    closest = "where they are closest, " if spread.size > 1 else ""
    name = r.name(low, "spread") or r.name(low, "typical")
    return (
        f"No collapse: {closest}at {r.block(low)}, the tokens differ from their mean by {percent(spread[low])} of "
        f"their size{name}.{tail}"
    )


def _unknown(r: StackReading) -> str:
    if r.battery.tokens is not None and (r.battery.tokens < 2).all():
        return "No verdict: the sequences have one token each, and a residual needs two."
    return f"No verdict: every value at {r.battery.site} is undefined or not finite."


_SENTENCES: Mapping[State, Callable[[StackReading], str]] = {
    State.UNKNOWN: _unknown,
    State.HEALTHY: _healthy,
    State.MEAN_OFFSET: _mean_offset,
    State.FEW_DIRECTIONS: _few_directions,
    State.HUGE_CHANNEL: _huge_channel,
    State.HUGE_TOKEN: _huge_token,
    State.SAME_DIRECTION: _same_direction,
    State.CLUSTERS: _clusters,
    State.COPIES: _copies,
    State.COLLAPSING: _collapsing,
    State.FLOOR: _at_floor,
    State.COLLAPSED: _collapsed,
    State.VANISHED: _vanished,
}


def percent(share: float) -> str:
    """A share in words: ``63%``, ``0.39%``, ``99.6%``, ``>99.9%``."""
    value = 100.0 * float(share)
    if value < 0.01:
        return f"{float(share):.1e}" if value > 0 else "0"
    if 99.0 < value < 100.0:
        return f"{value:.1f}%" if value < 99.95 else ">99.9%"
    return f"{value:.0f}%" if value >= 9.95 else f"{value:.2g}%"


def _course(r: StackReading, rows: list[int]) -> str:
    """How a collapse developed, unless it was present from the first block."""
    first = r.spread()[0]
    return "" if rows[0] == 0 or math.isnan(first) else f", down from {percent(first)} at block {r.battery.layers[0]}"


def _median_direction(r: StackReading, row: int) -> float:
    known = r.battery.direction()[row, r.members]
    known = known[np.isfinite(known)]
    return float(np.median(known)) if known.size else math.nan


def _floor_words(r: StackReading) -> str:
    return "float floor" if r.floor_relative is None else f"float floor {number(r.floor_relative)}"


def _afterwards(r: StackReading, rows: list[int]) -> str:
    """Whether the stream spreads again after the last collapsed block."""
    spread, last = r.spread(), r.battery.layers.size - 1
    if rows[-1] == last or not math.isfinite(spread[last]):
        return ""
    text = f" It spreads again to {percent(spread[last])} at block {r.battery.layers[last]}"
    if rows[-1] in r.rows(State.FLOOR):
        text += ", which may be rounding noise that a norm amplified"
    return f"{text}."


def _others_words(r: StackReading, row: int) -> str:
    """What metrics that weight all tokens equally say about the other tokens."""
    if r.metric("typical", row):
        apart = percent(r.value("typical", row))
        return f" The others: a typical pair differs by {apart} of its size{r.name(row, 'typical')}."
    words = r.cite("cosine", row)
    if words is None:
        return ""
    apart = "stay apart" if r.value("cosine", row) < 1.0 - SHARED_RESIDUAL**2 else "point in similar directions"
    return f" The others {apart} ({words}, which weights all tokens equally)."


def _besides(r: StackReading) -> str:
    """Milder states of the same sequences in other blocks, and blocks without any defined value."""
    clauses = []
    for state, (part, words) in BESIDES.items():
        rows = r.rows(state)
        if not rows or state >= r.state or r.state is State.VANISHED:
            continue
        if r.state >= State.COLLAPSING and state in ON_THE_WAY:
            continue
        row = r.worst(part, rows, highest=part.endswith("share"))
        clauses.append(f" Also {words} {r.span(state)}{r.cite_all(row, part)}.")
    lost = (r.battery.undefined & ~r.battery.vanished)[:, r.members].all(axis=1)
    if lost.any() and r.state is not State.UNKNOWN:
        blocks = ", ".join(str(layer) for layer in r.battery.layers[lost])
        clauses.append(f" Undefined in block{'s' if lost.sum() > 1 else ''} {blocks}.")
    return "".join(clauses)


def in_words(r: StackReading) -> str:
    """The state in a few words, for a sentence about several networks."""
    if r.state is State.COLLAPSING:
        trends = [trend for trend in r.trends if trend is not None]
        factor = float(np.median([trend.factor for trend in trends]))
        crossing = int(np.median([trend.crossing for trend in trends]))
        count = f" {r.count().rstrip()}" if not r.is_everywhere else ""
        return (
            f"collapsing{count} by a factor of {factor:.2f} per block, below {COLLAPSED_RESIDUAL:g} at block {crossing}"
        )
    words = _HOLD.get(r.state, r.state.code)
    return words if r.is_everywhere else f"{words} {r.count().rstrip()}"


def _minority(r: StackReading) -> str:
    """Sequences in a more severe state than the one that half of them reach."""
    if r.state.is_grave or r.state is State.UNKNOWN:
        return ""
    by_sequence = r.states.max(axis=0)
    graver = [State(int(one)) for one in by_sequence if one > r.state]
    falling = sum(trend is not None for trend in r.trends) if r.state < State.COLLAPSING else 0
    parts = [f"{graver.count(state)} {_HOLD[state]}" for state in dict.fromkeys(sorted(graver, reverse=True))]
    parts = [f"{falling} collapsing", *parts] if falling else parts
    return f" Of {r.total} sequences, {', '.join(parts)}." if parts else ""


_HOLD: Mapping[State, str] = {
    State.HEALTHY: "no collapse",
    State.MEAN_OFFSET: "with a large common vector",
    State.FEW_DIRECTIONS: "with few directions",
    State.HUGE_CHANNEL: "with one huge channel",
    State.HUGE_TOKEN: "with one huge token",
    State.SAME_DIRECTION: "with one common direction",
    State.CLUSTERS: "with clusters of copies",
    State.COPIES: "with copies of one token",
    State.COLLAPSING: "collapsing",
    State.FLOOR: "at the float floor",
    State.VANISHED: "exactly zero",
}


def _rest(r: StackReading) -> str:
    """What is not in the state a verdict is named after: other blocks, or other sequences."""
    words = []
    for beside in r.besides:
        if beside.state is State.UNKNOWN:
            continue
        sentence = sentence_for(beside).replace(f" {HARM}", "")
        others = beside.members.size
        whose = "The other sequence" if others == 1 else f"The other {others} sequences"
        whose = "Where it is not zero" if r.state is State.VANISHED else whose
        words.append(f" {whose}: {sentence[:1].lower()}{sentence[1:]}")
    return "".join(words)


def not_excluded(readings: Sequence[StackReading]) -> str:
    """What the battery could not exclude because it was not measured."""
    open_ones = [r for r in readings if State.UNKNOWN < r.state < State.COPIES and r.state is not State.HUGE_TOKEN]
    missing = [words for part, words in LOOKALIKES.items() if any(part not in r.battery.played_by for r in open_ones)]
    return f"Not measured, so not excluded: {', '.join(missing)}." if missing else ""
