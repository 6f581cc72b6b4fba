"""Citations of formulas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cite:
    """A statement in the literature: a key of ``docs/references.bib`` and the place inside it.

    Example:
        >>> str(Cite("dong2021attention", "thm. 2.2"))
        'dong2021attention, thm. 2.2'
    """

    key: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.key}, {self.place}" if self.place else self.key
