"""Estimates how much memory an offloaded run takes, before it starts."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

from rankscope.errors import InputError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_size(size: int | str) -> int:
    """A number of bytes from a size such as ``"3GiB"``.

    Example:
        >>> parse_size("3GiB"), parse_size("1.5 MB"), parse_size(100)
        (3221225472, 1500000, 100)

    Raises:
        InputError: not a size.
    """
    match = _SIZE.fullmatch(str(size))
    if match is None or not 0 < float(match[1]) < 1e18:
        raise InputError(f"memory={size!r} is not a size. Write for example '3GiB', '800MB' or a number of bytes.")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def in_words(size: int) -> str:
    """A size with its unit, for messages."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"


def resident_bytes() -> int:
    """Resident memory of this process; 0 if the system does not report it."""
    try:
        words = Path("/proc/self/statm").read_text(encoding="ascii").split()
        import resource

        return int(words[1]) * resource.getpagesize()
    except (OSError, ImportError, IndexError, ValueError):
        return 0


@dataclass(frozen=True)
class Need:
    """**Estimate** of the memory of a run, in bytes.

    Attributes:
        process: Python, its libraries and everything already in memory.
        block: the weights of the largest block.
        widened: a copy of these weights in float64, for a verb that computes in float64.
        work: activations of one block for one batch, including the statistics.
        states: the residual streams of all batches, twice (before and after a block).
        ahead: the next block, read from a server while this one computes; 0 for a local folder.
    """

    process: int
    block: int
    widened: int
    work: int
    states: int
    ahead: int = 0

    def total(self, *, in_memory: bool) -> int:
        """The sum, with the residual streams in memory or in files."""
        return self.process + self.block + self.ahead + self.widened + self.work + self.states * in_memory

    def __str__(self) -> str:
        return ", ".join(f"{item.name} {in_words(getattr(self, item.name))}" for item in fields(self))


def reads_ahead(need: Need, memory: int | str | None) -> bool:
    """Whether the next block can be read while one computes; the hidden states go first."""
    return need.ahead > 0 and (memory is None or need.total(in_memory=True) <= parse_size(memory))


def keeps_streams_in_memory(need: Need, memory: int | str | None) -> bool:
    """Whether the residual streams of all batches fit the budget; if not, they go to files.

    Raises:
        InputError: not even one block at a time fits.
    """
    if memory is None:
        return True
    budget = parse_size(memory)
    least = need.total(in_memory=False)
    if least > budget:
        raise InputError(
            f"memory={memory!r}: one block at a time takes about {in_words(least)} ({need}). Allow that much, or use "
            "fewer tokens or a smaller batch if work is the larger part."
        )
    return need.total(in_memory=True) <= budget
