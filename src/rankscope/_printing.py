"""One-line ``repr`` for objects that hold more than a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

LONGEST = 160
_LONGEST_VALUE = 60


def brief(self: Any) -> str:
    """``Name(field=value, ...)`` with the fields of a dataclass that are not at their defaults, cut at 160 characters.

    Assign it in the body of the class: ``__repr__ = brief``.
    """
    shown = [
        f"{one.name}={_value(value)}"
        for one in fields(self)
        if one.repr and not _is_default(value := getattr(self, one.name), one)
    ]
    return shortened(f"{type(self).__name__}({', '.join(shown)})")


def shortened(text: str, most: int = LONGEST) -> str:
    """The text in one line, cut at a word if it is too long.

    Example:
        >>> shortened("one two three", most=9)
        'one two …'
    """
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    start, space, _ = line[: most - 1].rpartition(" ")
    return f"{start if space else line[: most - 1]} …"


def first_sentence(text: str) -> str:
    """The first sentence of a text, for a line of its own.

    Example:
        >>> first_sentence("At block 2 it is 0.81. All is well.")
        'At block 2 it is 0.81.'
    """
    start, stop, _ = text.partition(". ")
    return f"{start}." if stop else text


def _is_default(value: Any, declared: Field[Any]) -> bool:
    if isinstance(value, (list, tuple, set, frozenset, Mapping)) and not value:
        return not declared.default or declared.default is MISSING
    default = declared.default
    return value is default or (type(value) is type(default) and value == default)


def _value(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__}{tuple(shape)}"
    if hasattr(value, "named_parameters") or callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return shortened(repr(value), _LONGEST_VALUE)
