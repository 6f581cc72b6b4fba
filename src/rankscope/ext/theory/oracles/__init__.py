"""Curves and numbers of theory at initialisation, each valid if its assumptions about a design hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Assumption:
    """A condition on a design and its tokens: in words, whether it holds, and the value found."""

    words: str
    holds: bool
    found: Any


@dataclass(frozen=True)
class OracleAnswer:
    """The answer of one oracle for a design, or why it has none.

    Attributes:
        name: name of the oracle.
        assumptions: all must hold.
        log10_relative: its curve of log10 relative residuals, starting with the first tokens; may be empty.
        values: its other numbers.
        cites: source of the oracle; empty for ours.
    """

    name: str
    assumptions: tuple[Assumption, ...]
    log10_relative: tuple[float, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    cites: tuple[str, ...] = ()

    @property
    def applies(self) -> bool:
        """Whether its assumptions hold."""
        return all(one.holds for one in self.assumptions)

    def to_json(self) -> dict[str, Any]:
        """All fields except the curve, which is in the rows."""
        return {
            "oracle": self.name,
            "applies": self.applies,
            "assumptions": [{"assumption": a.words, "holds": a.holds, "found": a.found} for a in self.assumptions],
            "values": dict(self.values),
            "cites": list(self.cites),
        }
