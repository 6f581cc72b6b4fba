"""Damage done to bytes, the same for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

ODD = (None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 1e308, -0.0, 0.5, "", "x", "\ud800", "../../x", [], {}, [[]],
       {"": None}, "9" * 400, "<script>")  # fmt: skip
LONGEST = 1 << 16


def mutated(seeds: Sequence[bytes], words: Sequence[bytes], chance: random.Random) -> bytes:
    """One of the seeds with one to six changes, some of them aware of JSON."""
    data = chance.choice(seeds)
    if chance.random() < 0.35 and (changed := _as_json(data, chance)) is not None:
        return changed
    for _ in range(chance.randint(1, 6)):
        data = chance.choice(_CHANGES)(data, words, chance)
    return data[:LONGEST]


def _as_json(data: bytes, chance: random.Random) -> bytes | None:
    """The same document (or one line of it) with some values replaced or dropped; None where it is not JSON."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        lines = data.split(b"\n")
        if len(lines) == 1:
            return None
        place = chance.randrange(len(lines))
        line = _as_json(lines[place], chance)
        return None if line is None else b"\n".join((*lines[:place], line, *lines[place + 1 :]))
    for _ in range(chance.randint(1, 3)):
        found = _changed(found, chance)
    return json.dumps(found).encode("utf-8", "surrogatepass")


def _changed(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.85:
        name = chance.choice(list(value))
        what = chance.random()
        if what < 0.15:
            return {key: item for key, item in value.items() if key != name}
        return {**value, name: _changed(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [*value[:place], _changed(value[place], chance), *value[place + chance.choice((0, 1, 1, 1)) :]]
    return chance.choice(ODD)


def _flip(data: bytes, words: Sequence[bytes], chance: random.Random) -> bytes:
    if not data:
        return data
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]


def _set(data: bytes, words: Sequence[bytes], chance: random.Random) -> bytes:
    if not data:
        return data
    place = chance.randrange(len(data))
    return data[:place] + bytes([chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))]) + data[place + 1 :]


def _cut(data: bytes, words: Sequence[bytes], chance: random.Random) -> bytes:
    first, last = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:first] + data[last:]


def _repeat(data: bytes, words: Sequence[bytes], chance: random.Random) -> bytes:
    first, last = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:last] + data[first:last][:4096] * chance.randint(1, 8) + data[last:]


def _insert(data: bytes, words: Sequence[bytes], chance: random.Random) -> bytes:
    place = chance.randrange(len(data) + 1)
    piece = chance.choice(words) if words and chance.random() < 0.8 else chance.randbytes(chance.randint(1, 8))
    return data[:place] + piece + data[place + (len(piece) if chance.random() < 0.3 else 0) :]


def _length(data: bytes, words: Sequence[bytes], chance: random.Random) -> bytes:
    """A number where a length might stand."""
    if len(data) < 8:
        return data
    place, size = chance.randrange(len(data) - 7), chance.choice((1, 2, 4, 8))
    value = chance.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, chance.randrange(2**16)))
    return data[:place] + (value % 256**size).to_bytes(size, "little") + data[place + size :]


_CHANGES: tuple[Callable[[bytes, Sequence[bytes], random.Random], bytes], ...] = (
    _flip, _set, _cut, _repeat, _insert, _insert, _length,
)  # fmt: skip
