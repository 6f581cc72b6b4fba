r"""Untrusted JSON: a parser whose failures all raise the same exception, and a seal that makes changes noticeable.

A sealed document is a JSON object whose first entry is a checksum of everything after it::

    {"seal":"SIZE SIZESUM SUM", "kind": ...}

with the number of bytes that follow (8 hexadecimal digits), the SHA-256 of these digits (its first 8) and the SHA-256
of the bytes that follow (its first 16), written without spaces. The size tells a document that is cut off, as the last
line of a log after a kill, from one that was changed; its own checksum keeps a changed size from passing as a cut.

The seal protects against accidents, such as a flipped bit, a partial copy or an editor. Anybody can compute it, so the
content of a sealed document is no more trusted than any other.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from rankscope._foreign_text import visible

DEEPEST = 60
_OPEN, _CLOSE = b'{"seal":"', b'",'
_SEAL = re.compile(rb'\{"seal":"([0-9a-f]{8})([0-9a-f]{8})([0-9a-f]{16})",')
_MAYBE_LARGE = re.compile(rb"[0-9]{100}|[eE]\+?[0-9]{3}")
_ANY_SEAL = _OPEN + b"0" * 32 + _CLOSE


class TruncatedError(ValueError):
    """A sealed document whose end is missing."""


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
    text = content if isinstance(content, str) else content.decode(json.detect_encoding(content), "surrogatepass")
    try:
        parsed = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\u" in content if isinstance(content, str) else b"\\u" in content:
        _refuse_half_characters(parsed)
    return parsed


def seal(body: bytes) -> bytes:
    """The text of a JSON object with a seal as its first entry.

    Example:
        >>> seal(b'{"a":1}')
        b'{"seal":"00000006405391cd7359ed179b73607a","a":1}'
    """
    rest = body[1:]
    size = b"%08x" % len(rest)
    return _OPEN + size + _digest(size, 8) + _digest(rest, 16) + _CLOSE + rest


def sealed_json(facts: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Facts as a sealed JSON object; on one line without ``indent``."""
    separators = (",", ":") if indent is None else None
    text = json.dumps(dict(facts), indent=indent, separators=separators, ensure_ascii=False, allow_nan=False)
    return seal(text.encode("utf-8", "replace"))  # a file name may contain a lone surrogate


def parse_sealed(content: bytes) -> dict[str, Any]:
    r"""The object in a sealed document, without its seal and safe to show.

    Control characters and marks that change the direction of text become visible escapes, here and not where each
    text is shown: nothing that a file says can then move a cursor or disguise a name.

    Example:
        >>> parse_sealed(seal(b'{"a":"\\u001b[2J"}'))
        {'a': '\\u001b[2J'}

    Raises:
        TruncatedError: its end is missing.
        ValueError: it has no seal, was changed after it was sealed, or is not JSON that rankscope writes.
    """
    text = unsealed(content)
    facts: dict[str, Any] = _safe(parse_json(text), 0)
    if _MAYBE_LARGE.search(text):
        _refuse_large(facts)
    return facts


def unsealed(content: bytes) -> bytes:
    """The JSON text of a sealed document, whose content is not checked any further.

    Raises:
        TruncatedError: its end is missing.
        ValueError: it has no seal, or was changed after it was sealed.
    """
    seal = _SEAL.match(content)
    if seal is None:
        if len(content) < len(_ANY_SEAL) and _SEAL.match(content + _ANY_SEAL[len(content) :]):
            raise TruncatedError("its end is missing")
        raise ValueError("it has no checksum: rankscope did not write it, or it was changed afterwards")
    size, check, digest = seal.groups()
    rest = content[seal.end() :]
    if _digest(size, 8) == check and len(rest) < int(size, 16):
        raise TruncatedError("its end is missing")
    if _digest(size, 8) != check or _digest(rest, 16) != digest:
        raise ValueError("its checksum differs: it was changed after it was written")
    return b"{" + rest


def _digest(content: bytes, digits: int) -> bytes:
    return hashlib.sha256(content).hexdigest()[:digits].encode("ascii")


def _safe(value: Any, depth: int) -> Any:
    """The value with visible text; refuses nesting that would exhaust the stack."""
    if isinstance(value, str):
        return value if value.isprintable() else visible(value)
    if not isinstance(value, (list, dict)):
        return value
    if depth == DEEPEST:
        raise ValueError("it is nested too deeply")
    if isinstance(value, list):
        return [_safe(item, depth + 1) for item in value]
    return {visible(name): _safe(item, depth + 1) for name, item in value.items()}


def _refuse_large(value: Any) -> None:
    """Refuse numbers that overflow a float: JSON has no limit, and 1e999 is read as infinity."""
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_large(item)
    elif (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and abs(value) > 10**300):
        raise ValueError("it holds a number too large for a float")


def _not_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_not_json)
"""Made once: ``json.loads`` makes one for each call with an option, which takes as long as a short document."""


def _refuse_half_characters(found: Any) -> None:
    try:
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it holds half a character (a lone surrogate)") from None
