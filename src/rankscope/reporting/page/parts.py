"""What a report is made of: sections of charts and tables, as plain values that a template writes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ChartKind = Literal["lines", "bars", "waterfall", "heat", "matrix", "multiples"]
DIGITS = 5


@dataclass(frozen=True)
class Choice:
    """One thing the reader can switch: its name and the options in order, as ``(value, label)``."""

    name: str
    options: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Chart:
    """A drawing with one or more views.

    Args:
        kind: which function of the page draws it.
        title: what it shows.
        caption: how to read it.
        choices: what can be switched; empty for a single view.
        views: for each combination of options that exists, what is drawn.
        slider: the choice that is a slider and not a list.
        cards: whether the first choice is also offered as cards with a small curve.
    """

    kind: ChartKind
    title: str
    caption: str
    choices: tuple[Choice, ...]
    views: Mapping[tuple[str, ...], Mapping[str, Any]]
    slider: str | None = None
    cards: bool = False

    def payload(self) -> dict[str, Any]:
        """What the page's script needs."""
        return {
            "kind": self.kind,
            "title": self.title,
            "choices": [{"name": choice.name, "options": choice.options} for choice in self.choices],
            "slider": self.slider,
            "cards": self.cards,
            "views": [{"key": list(key), **view} for key, view in self.views.items()],
        }


@dataclass(frozen=True)
class Cell:
    """One cell of a table: words, perhaps a metric to explain, a class, a number to sort by."""

    words: str
    term: str | None = None
    mark: str = ""
    order: float | None = None


@dataclass(frozen=True)
class Table:
    """Rows under a head; cells are words or :class:`Cell`."""

    caption: str
    head: Sequence[str | Cell]
    rows: Sequence[Sequence[str | Cell]]
    folded: bool = False
    left_out: int = 0
    sortable: bool = False


@dataclass(frozen=True)
class Section:
    """A heading, some words, and what is shown under it."""

    title: str
    lead: str
    parts: tuple[Chart | Table, ...]


@dataclass(frozen=True)
class Missing:
    """Something a run could show had it been measured, and the command that measures it."""

    what: str
    command: str


@dataclass(frozen=True)
class Chapter:
    """Everything about one run (or one comparison)."""

    title: str
    question: str
    state: str
    headline: str
    verdict: Sequence[str]
    tiles: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    evidence: Table | None = None
    notes: Sequence[str] = ()
    missing: Sequence[Missing] = ()
    origin: Sequence[tuple[str, str]] = ()
    command: str = ""
    anchor: str = field(default="", compare=False)


def plain(value: float) -> float | None:
    """A number short enough to store many of; None where it is not finite.

    Example:
        >>> plain(0.123456789), plain(float("nan"))
        (0.12346, None)
    """
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def plain_list(values: NDArray[np.float64] | Sequence[float]) -> list[float | None]:
    """Each value by :func:`plain`."""
    return [plain(float(value)) for value in values]
