"""Every sentence that a verdict can print, and those about the tokens of one stack.

A verdict says the state first, then where, then two numbers; what they mean is in its details and on the page about
verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rankscope.verdicts.battery import PARTS
from rankscope.verdicts.reading import SEEN_OR_NOT, StackReading, steady
from rankscope.verdicts.states import COLLAPSED_RESIDUAL, MEANINGS, State

SENTENCES: Mapping[str, str] = {
    # States of the tokens of a sequence, or of different inputs.
    "healthy": "No collapse.",
    "mean offset": "No collapse: {items} share a large common vector {where}.",
    "few directions": "The {items} differ along a few directions only, {where}.",
    "huge channel": "One channel carries most of the energy, {where}.",
    "huge token": "One of the {items} carries most of the energy, {where}.",
    "clusters": "Nearly all {items} are copies of one another, {where}.",
    "same direction": "All {items} point the same way, {where}.",
    "copies": "Half of the {items} or more are copies of one, {where}.",
    "collapsing": "Collapsing {whose}: at this rate, {items} are nearly equal after block {crossing}.",
    "floor": "At the float floor {where}: {items} are equal to the last digit.",
    "collapsed": "Collapsed {where}: all {items} are nearly equal.",
    "vanished": "Vanished {where}: the stream is exactly zero.",
    # Why there is none.
    "not measured": "No verdict: none of the metrics it is drawn from was measured.",
    "one token": "No verdict: the sequences have one token each, and a residual needs two.",
    "unknown": "No verdict: every value at {site} is undefined or not finite.",
    # Their numbers.
    "lowest": "Lowest {metric}: {value}, after block {block} of {blocks}.",
    "values": "{values}, after block {block} of {blocks}.",
    "change": "{metric} {value} after block {block}, {other} after block {start}.",
    "at the floor": "It reaches {floor} {where}.",
    "below the floor": "Differences below {floor} cannot be measured: use float64.",
    # What else was seen, or was not.
    "also": "Also {states}.",
    "undefined": "Undefined {where}.",
    "minority": "Of {total} sequences, {states}.",
    "others": "{whose}: {state}.",
    "not excluded": "Not measured, so not excluded: {states}.",
    # Other axes.
    "axes": "Collapsed along {axes}{rest}.",
    "inputs not judged": "Between inputs{pooling}: not judged, because {why}.",
    "classes": "Inputs of one class meet {where}, and classes stay apart (neural collapse).",
    "attention": "{name} is {kind} in {heads}.",
    "sinks": "A sink on the first token in {sinking} of {heads} heads (usual in trained models).",
    "uniform": "{name} is uniform in all heads (usual at initialisation).",
    "one-hot": "{name} is one-hot in all heads, and passes hardly any gradient to queries and keys.",
    "depth": "{idle} of {blocks} blocks change the stream by less than {least} (usual at initialisation).",
    "experts": "Experts: routers use {used} of {experts}.",
    "idle experts": "Experts: {idle} of {routers} routers send nearly every token to the same experts.",
    "streams": "Streams of a token differ. Relative residual {value} after block {block}.",
    "equal streams": "Streams of a token are equal {where}. Relative residual {value} after block {block}.",
}
"""Each at most 25 words long when it is printed."""

WORDS: Mapping[State, str] = {
    State.UNKNOWN: "no verdict",
    State.HEALTHY: "no collapse",
    State.MEAN_OFFSET: "a large common vector",
    State.FEW_DIRECTIONS: "few directions",
    State.HUGE_CHANNEL: "one huge channel",
    State.HUGE_TOKEN: "one huge token",
    State.SAME_DIRECTION: "one common direction",
    State.CLUSTERS: "clusters of copies",
    State.COPIES: "copies of one token",
    State.COLLAPSING: "collapsing",
    State.FLOOR: "at the float floor",
    State.COLLAPSED: "collapsed",
    State.VANISHED: "exactly zero",
}

DECIDING: Mapping[State, tuple[str, ...]] = {
    State.MEAN_OFFSET: ("spread", "typical"),
    State.FEW_DIRECTIONS: ("centred_dimension", "directions"),
    State.HUGE_CHANNEL: ("channel_share", "typical"),
    State.HUGE_TOKEN: ("token_share", "typical"),
    State.CLUSTERS: ("distinct", "copied_share"),
    State.SAME_DIRECTION: ("direction", "cosine"),
    State.COPIES: ("cluster_share", "distinct"),
}
"""The parts that decide a state; the first one measured names the block, and both are printed."""
HIGHEST = frozenset({"cosine", "cluster_share", "copied_share", "token_share", "channel_share"})
"""Parts whose extreme is the largest value."""
ON_THE_WAY = (State.MEAN_OFFSET, State.SAME_DIRECTION, State.CLUSTERS, State.COPIES, State.FEW_DIRECTIONS)
"""States that tokens pass through on their way to being equal; not mentioned if the tokens collapse."""
LOOKALIKES: Mapping[str, State] = {
    "token_share": State.HUGE_TOKEN,
    "channel_share": State.HUGE_CHANNEL,
    "centred_dimension": State.FEW_DIRECTIONS,
    "cluster_share": State.COPIES,
}


def say(key: str, **facts: object) -> str:
    """The sentence under that key with its facts."""
    return SENTENCES[key].format(**facts)


def short(value: float) -> str:
    """Two significant digits, three just below 1.

    Example:
        >>> short(0.8803), short(3.7e-4), short(4.77e-7), short(0.9968), short(23.4), short(0.0)
        ('0.88', '3.7e-4', '4.8e-7', '0.997', '23', '0')
    """
    if not math.isfinite(value):
        return "undefined"
    if value != 0 and not 1e-3 <= abs(value) < 1e4:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits}e{int(exponent)}"
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.3g}" if 0.995 <= value < 1 else f"{value:.2g}"


def token_sentences(r: StackReading, floor: float | None = None, items: str = "tokens") -> list[str]:
    """The state, its numbers, and what else holds.

    Args:
        r: the sequences of one stack; the values printed, and all others at the same block, become its evidence.
        floor: the float floor, to print.
        items: what is compared.
    """
    told = _state_and_numbers(r, floor, items)
    # Milder states of the same sequences in other blocks.
    also = []
    for state, parts in DECIDING.items():
        rows = r.rows(state)
        passed = r.state >= State.COLLAPSING and state in ON_THE_WAY
        if rows and state < r.state and r.state is not State.VANISHED and not passed:
            part = _known(r, parts)
            r.cite(part, r.worst(part, rows, highest=part in HIGHEST))
            also.append(f"{WORDS[state]} {r.span(state)}")
    told += [say("also", states=", ".join(also))] if also else []
    # Blocks without any defined value.
    lost = np.flatnonzero((r.battery.undefined & ~r.battery.vanished)[:, r.members].all(axis=1)).tolist()
    if lost and r.state is not State.UNKNOWN:
        told.append(say("undefined", where=blocks_in_words(r.battery.layers[lost].tolist())))
    # Sequences in a graver state than the one that half of them reach.
    if not r.state.is_grave and r.state is not State.UNKNOWN:
        graver = [State(int(one)) for one in r.states.max(axis=0) if one > r.state]
        if r.state < State.COLLAPSING:
            graver += [State.COLLAPSING for trend in r.trends if trend is not None]
        states = [f"{graver.count(state)} {WORDS[state]}" for state in sorted(set(graver))]
        told += [say("minority", total=r.members.size, states=", ".join(states))] if states else []
    # What is not in the state: other blocks, or other sequences.
    for beside in r.besides:
        if beside.state is not State.UNKNOWN:
            others = beside.members.size
            whose = "The other sequence" if others == 1 else f"The other {others} sequences"
            whose = "Where it is not zero" if r.state is State.VANISHED else whose
            _state_and_numbers(beside, floor, items)  # for the evidence
            told.append(say("others", whose=whose, state=in_words(beside)))
    return told


def _state_and_numbers(r: StackReading, floor: float | None, items: str) -> list[str]:
    part, state, last = r.spread_part, r.state, r.battery.layers.size - 1
    limit = "the float floor" if floor is None else f"the float floor {short(floor)}"
    if state is State.UNKNOWN:
        alone = r.battery.tokens is not None and (r.battery.tokens < 2).all()
        return [say("one token") if alone else say("unknown", site=r.battery.site)]
    if state is State.VANISHED:
        return [say("vanished", where=r.where())]
    if state is State.FLOOR:
        _cite_all(r, r.worst(part, r.rows(State.FLOOR), highest=True))
        return [
            say("floor", where=r.where(), items=items),
            say("below the floor", floor="it" if floor is None else short(floor)),
        ]
    if state is State.COLLAPSED:
        rows, seen = r.rows(*SEEN_OR_NOT), r.rows(State.COLLAPSED)
        row = r.worst(part, [one for one in seen if one in rows] or seen)
        # Beside it, where the collapse came from; or where it went, if tokens differ again at the end.
        whose = " of a sequence" if items == "tokens" else ""
        told = [say("collapsed", where=r.where(*SEEN_OR_NOT), items=f"{items}{whose}")]
        told.append(_change(r, part, row, 0 if rows[-1] == last else last))
        if r.rows(State.FLOOR):
            told.append(say("at the floor", floor=limit, where=r.span(State.FLOOR)))
        return told
    if state is State.COLLAPSING:
        whose = r.count() or "block by block"
        return [say("collapsing", whose=whose, items=items, crossing=steady(r)[1]), _change(r, part, last, 0)]
    told = [say(state.code, items=items, where=r.where()) if state is not State.HEALTHY else say("healthy")]
    if state is State.HEALTHY or state is State.MEAN_OFFSET:
        row = r.worst(part, list(range(last + 1)))
        _cite_all(r, row)
        value = r.value(part, row)
        where = {"block": r.battery.layers[row], "blocks": last + 1}
        return told + ([say("lowest", metric=_name(r, part), value=short(value), **where)] if value == value else [])
    deciding = _known(r, DECIDING[state])
    row = r.worst(deciding, r.rows(state), highest=deciding in HIGHEST)
    r.cite(deciding, row)
    _cite_all(r, row)
    return [*told, _values(r, dict.fromkeys((deciding, *DECIDING[state])), row)]


def _known(r: StackReading, parts: Sequence[str]) -> str:
    return next((part for part in parts if part in r.battery.played_by), parts[0])


def _cite_all(r: StackReading, row: int) -> None:
    """All values at the block that is named are evidence: each excludes a state that looks alike in the others."""
    for part in PARTS:
        if part not in ("size", "dimension"):
            r.cite(part, row)


def _values(r: StackReading, parts: Mapping[str, object] | Sequence[str], row: int) -> str:
    known = [f"{_name(r, part)} {short(value)}" for part in parts if (value := r.cite(part, row)) == value]
    words = ", ".join(known)
    where = {"block": r.battery.layers[row], "blocks": r.battery.layers.size}
    return say("values", values=f"{words[:1].upper()}{words[1:]}", **where)


def _change(r: StackReading, part: str, row: int, start: int) -> str:
    """A value at the block that is named, and at another one if it is known there."""
    value, other = r.cite(part, row), r.cite(part, start)
    _cite_all(r, row)
    if row == start or other != other:
        return _values(r, [part], row)
    layers, name = r.battery.layers, _name(r, part).capitalize()
    return say("change", metric=name, value=short(value), block=layers[row], other=short(other), start=layers[start])


def _name(r: StackReading, part: str) -> str:
    return r.battery.played_by.get(part, PARTS[part][0]).replace("_", " ")


def blocks_in_words(layers: Sequence[int]) -> str:
    """``in block 3``, ``in blocks 1, 4 and 7 more``."""
    shown = ", ".join(map(str, layers[:2])) + (f" and {len(layers) - 2} more" if len(layers) > 2 else "")
    return f"in block{'s' if len(layers) > 1 else ''} {shown}"


def in_words(r: StackReading) -> str:
    """The state in a few words, for a sentence about several networks."""
    words = WORDS[r.state]
    if r.state is State.COLLAPSING:
        factor, crossing = steady(r)
        words = f"collapsing by a factor of {factor:.2f} per block, below {COLLAPSED_RESIDUAL:g} at block {crossing}"
    return words if r.is_everywhere else f"{words} {r.count()}"


def not_excluded(readings: Sequence[StackReading]) -> list[str]:
    """What the battery could not exclude because it was not measured."""
    open_ones = [r for r in readings if State.UNKNOWN < r.state < State.COPIES and r.state is not State.HUGE_TOKEN]
    missing = [
        WORDS[state] for part, state in LOOKALIKES.items() if any(part not in r.battery.played_by for r in open_ones)
    ]
    return [say("not excluded", states=", ".join(missing))] if missing else []


def explained(r: StackReading, null: Mapping[str, Mapping[str, float]]) -> str:
    """What the state means, and every value behind it; call it after writing the sentences."""
    lines = [f"{r.state.code.capitalize()}: {MEANINGS[r.state]}."]
    for item in r.cited_values(None):
        random = null.get(item["metric"])
        beside = f" (random tokens of the same shape: {short(float(random['mean']))})" if random else ""
        lines.append(f"  {item['metric'].replace('_', ' ')} {short(item['value'])} after block {item['layer']}{beside}")
    if r.state is State.COLLAPSING:
        lines.append(f"  falls by a factor of {steady(r)[0]:.2f} per block over the second half of the blocks")
    return "\n".join(lines)
