"""Damage done to bytes, the same for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

ODD = (None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 1e308, -0.0, 0.5, "", "x", "\ud800", "../../x", [], {}, [[]],
       {"": None}, "9" * 400, "<script>")  # fmt: skip
LONGEST = 1 << 16


def mutated(seeds: Sequence[bytes], words: Sequence[bytes], chance: random.Random, structured: float = 0.5) -> bytes:
    """One of the seeds with one to six changes, a share of them (``structured``) to values of JSON."""
    data = chance.choice(seeds)
    if chance.random() < structured and (changed := _as_json(data, pieces(tuple(words)), chance)) is not None:
        return changed
    for _ in range(chance.randint(1, 6)):
        data = chance.choice(_CHANGES)(data, words, chance)
    return data[:LONGEST]


@cache
def pieces(words: tuple[bytes, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The words that are values of JSON, and those that are a key with its value."""
    values, pairs = [], {}
    for word in words:
        for text, keep in ((word, values.append), (b"{" + word + b"}", pairs.update)):
            try:
                keep(json.loads(text))
            except (ValueError, RecursionError):
                continue
    return tuple(values), pairs


def _as_json(data: bytes, known: tuple[tuple[Any, ...], dict[str, Any]], chance: random.Random) -> bytes | None:
    """The same document (or one line of it) with some values replaced or dropped; None where it is not JSON."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        lines = data.split(b"\n")
        if len(lines) == 1:
            return None
        place = chance.randrange(len(lines))
        line = _as_json(lines[place], known, chance)
        return None if line is None else b"\n".join((*lines[:place], line, *lines[place + 1 :]))
    for _ in range(chance.randint(1, 3)):
        found = _changed(found, known, chance)
    return json.dumps(found).encode("utf-8", "surrogatepass")


def _changed(value: Any, known: tuple[tuple[Any, ...], dict[str, Any]], chance: random.Random) -> Any:
    values, pairs = known
    if isinstance(value, dict) and value and chance.random() < 0.95:
        name = chance.choice(list(value))
        what = chance.random()
        if what < 0.15:
            return {key: item for key, item in value.items() if key != name}
        if what < 0.3 and pairs:
            key = chance.choice(list(pairs))
            return {**value, key: pairs[key]}
        return {**value, name: _changed(value[name], known, chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        if chance.random() < 0.1:
            return [*value[:place], *[value[place]] * chance.choice((2, 8, 50)), *value[place + 1 :]]
        inner = _changed(value[place], known, chance)
        return [*value[:place], inner, *value[place + chance.choice((0, 1, 1, 1)) :]]
    return chance.choice((*ODD, *values))


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
