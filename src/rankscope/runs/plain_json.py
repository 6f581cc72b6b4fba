"""Parser for untrusted JSON: every failure raises the same exception."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def parse_json(content: bytes | str) -> Any:
    """Parse a JSON document.

    Stricter than the standard library: refuses ``NaN`` and ``Infinity``, which are not JSON, lone surrogates, which
    cannot be written to a file or terminal, and excessive nesting.

    Example:
        >>> parse_json(b'{"a": [1, null]}')
        {'a': [1, None]}

    Raises:
        ValueError: the only exception raised, with the reason.
    """
    try:
        found = json.loads(content, parse_constant=_not_json)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\u" in content if isinstance(content, str) else b"\\u" in content:
        _refuse_half_characters(found)
    return found


def _not_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _refuse_half_characters(found: Any) -> None:
    try:
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it holds half a character (a lone surrogate)") from None
