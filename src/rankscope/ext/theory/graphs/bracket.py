"""A value that is known exactly or within an interval, and how it was found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bracket:
    """A number in ``[lower, upper]``, and how it was found.

    Attributes:
        lower: lower bound.
        upper: upper bound; infinite if the number is, or if nothing is known.
        status: how it is known, or why it is not.

    Example:
        >>> Bracket.exactly(3).value, Bracket(2, 5, "budget spent").value
        (3, None)
    """

    lower: float
    upper: float
    status: str

    @classmethod
    def exactly(cls, value: float, status: str = "exact") -> Bracket:
        """A number that is known."""
        return cls(value, value, status)

    @property
    def is_known(self) -> bool:
        """Whether both ends agree."""
        return self.lower == self.upper

    @property
    def value(self) -> float | None:
        """The number if it is known and finite, else None."""
        return self.lower if self.is_known and math.isfinite(self.lower) else None

    def to_json(self) -> dict[str, Any]:
        """Both ends, an infinite one as None, and the status."""
        ends = [end if math.isfinite(end) else None for end in (self.lower, self.upper)]
        return {"lower": ends[0], "upper": ends[1], "status": self.status}
