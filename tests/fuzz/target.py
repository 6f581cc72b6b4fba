"""One reader of something a stranger wrote, and how to tell what it did with a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rankscope.errors import RankscopeError


@dataclass(frozen=True)
class Target:
    """One reader.

    Attributes:
        name: as on the command line of ``scripts/fuzz.py``.
        seeds: valid (or nearly valid) inputs to start from.
        read: gives the bytes to the reader; the folder is empty and its own.
        words: pieces worth inserting.
        weight: share of a campaign's cases; slow readers have less.
        structured: share of cases in which values of JSON are changed rather than bytes.
    """

    name: str
    seeds: Callable[[], tuple[bytes, ...]]
    read: Callable[[bytes, Path], None]
    words: tuple[bytes, ...] = ()
    weight: float = 1.0
    structured: float = 0.5


def outcome(target: Target, data: bytes, folder: Path) -> str:
    """``"read"`` or ``"refused"``; any other exception passes through, it is a finding.

    A refusal must say something, and must come before memory is asked for: an error without words is a finding, and
    so is one that wraps a failed allocation.
    """
    try:
        target.read(data, folder)
    except RankscopeError as error:
        if not str(error).strip():
            raise AssertionError("an error without words") from error
        if ran_out_of_memory(error):
            raise AssertionError("memory was asked for before the case was refused") from error
        return "refused"
    return "read"


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed anywhere behind this error."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError) or "allocate memory" in str(seen):
            return True
        seen = seen.__cause__
    return False
