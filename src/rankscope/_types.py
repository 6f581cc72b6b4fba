"""Small types shared by all packages; imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from rankscope.errors import InputError

_LONGEST_NAME, _LONGEST_PATH = 255, 4096


class Status(str, Enum):
    """How far a value can be trusted.

    Means include values that are ``OK``, ``FLOOR`` or ``ESTIMATE``, and are marked if one of them is not ``OK``;
    verdicts count the others.
    """

    OK = "ok"
    FLOOR = "at the float floor"
    UNDEFINED = "undefined"
    NOT_FINITE = "not finite"
    NOT_FIRED = "not fired"
    ESTIMATE = "estimated"

    def __str__(self) -> str:
        return self.value


def path_of(given: object, what: str, expected: str) -> Path:
    """Convert ``given`` to a path, with ``~`` expanded.

    Args:
        given: the value the caller passed.
        what: the name of the argument.
        expected: what was expected, for the message.

    Raises:
        InputError: it cannot be a path of any file system.

    Example:
        >>> path_of({"a": 1}, "model", "a folder")
        Traceback (most recent call last):
        rankscope.errors.InputError: model is a dict; expected a folder.
    """
    place = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(place, str):
        raise InputError(f"{what} is {kind_of(given)}; expected {expected}.")
    longest = max((len(os.fsencode(name)) for name in place.split(os.sep)), default=0)
    if "\0" in place or longest > _LONGEST_NAME or len(place) > _LONGEST_PATH:
        raise InputError(f"{what} is a text of {len(place)} characters ({place[:40]!r}...); expected {expected}.")
    return Path(place).expanduser()


def kind_of(value: object) -> str:
    """The type of a value that a caller passed, for messages.

    Example:
        >>> kind_of(None), kind_of([1]), kind_of(dict)
        ('None', 'a list', 'the class dict')
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    if isinstance(value, Mapping) and value and all(hasattr(entry, "dtype") for entry in value.values()):
        return f"a dict of {len(value)} tensors (a state dict)"
    name = "dict" if isinstance(value, dict) else name
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


NAMED = re.compile(r"(?P<place>[^:\s]+\.py|[A-Za-z_]\w*(?:\.\w+)*):(?P<object>[A-Za-z_][\w.]*)(?:\[(?P<index>\w+)\])?")
"""An object of the user's own code: ``train.py:build_model``, ``package.module:batch[0]``."""
_OTHERS = ("init", "hub", "http", "https", "s3", "gs", "file")


def is_named(text: str) -> bool:
    """Whether a text has the form of such a name.

    Example:
        >>> is_named("train.py:build_model"), is_named("package.module:batch[0]"), is_named("init:tiny-bert")
        (True, True, False)
    """
    found = NAMED.fullmatch(text)
    return found is not None and found["place"] not in _OTHERS
