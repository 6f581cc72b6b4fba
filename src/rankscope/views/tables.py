"""Tables as data: the text and the marks of each cell. Renderers decide how they look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mark = Literal["floor", "estimate", "apart", "good", "care", "bad", "faint"]
"""``floor``: at the float floor. ``estimate``: not computed exactly. ``apart``: an interval that excludes zero. The
others only colour a cell."""

PREFIXES: dict[Mark, str] = {"estimate": "~"}
SUFFIXES: dict[Mark, str] = {"floor": "*", "apart": "*"}
UNDEFINED = "undefined"


def number(value: float) -> str:
    """Format with three significant digits, without an exponent if that is easier to read.

    Example:
        >>> number(0.4567), number(1.9e-7), number(59.31), number(1234.5)
        ('0.457', '1.90e-07', '59.3', '1.23e+03')
    """
    if not math.isfinite(value):
        return UNDEFINED
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 999.5:
        return f"{value:.2e}"
    digits = 4 if size < 0.09995 else 3 if size < 0.9995 else 2 if size < 9.995 else 1
    return f"{value:.{digits}f}"


@dataclass(frozen=True)
class Cell:
    """One cell; ``str(cell)`` is its text with the signs of its marks.

    Args:
        text: text without the signs of its marks.
        marks: what to know about the value.
        detail: text after the signs, such as an interval.
        term: name of its metric, which the page explains.

    Example:
        >>> str(Cell("0.12", ("apart",), detail="[0.10, 0.14]"))
        '0.12* [0.10, 0.14]'
    """

    text: str
    marks: tuple[Mark, ...] = ()
    detail: str = ""
    term: str | None = None

    def __str__(self) -> str:
        before = "".join(PREFIXES.get(mark, "") for mark in self.marks)
        after = "".join(SUFFIXES.get(mark, "") for mark in self.marks)
        return f"{before}{self.text}{after}" + (f" {self.detail}" if self.detail else "")


@dataclass(frozen=True, eq=False)
class Column:
    """The head of a column.

    Args:
        name: title of the column.
        align: right for numbers, left for names.
        trend: values of the whole column, drawn as a small curve below it if the medium supports it.
        term: name of the metric in it, which the page explains.
        width: ``narrow`` and ``wide`` are for words; the page wraps them.
        spare: columns with a higher number are left out first if a terminal is too narrow, and named.
    """

    name: str
    align: Literal["left", "right"] = "right"
    trend: Sequence[float] | None = None
    term: str | None = None
    width: Literal["", "narrow", "wide"] = ""
    spare: int = 0


Row = Sequence[str | Cell]
"""Cells of one row."""


@dataclass(frozen=True, eq=False)
class Table:
    """Rows under a head. A plain string is short for a column or cell with that text only.

    Args:
        columns: heads, left to right.
        rows: cells, one per column.
        caption: what is shown; empty if that is clear.
        row_trends: one curve per row, drawn after its last cell if the medium supports it.
        folded: whether the page shows it collapsed.
        left_out: number of rows omitted at the end.

    Example:
        >>> table = Table(["block", "residual"], [["0", Cell("0.9")], ["9", Cell("1e-8", ("floor",))]])
        >>> table.head[1].name, str(table.body[1][1]), sorted(table.marks)
        ('residual', '1e-8*', ['floor'])
    """

    columns: Sequence[str | Column]
    rows: Sequence[Row]
    caption: str = ""
    row_trends: Sequence[Sequence[float]] = ()
    folded: bool = False
    left_out: int = 0

    @property
    def head(self) -> tuple[Column, ...]:
        """Every column as a :class:`Column`."""
        return tuple(column if isinstance(column, Column) else Column(column) for column in self.columns)

    @property
    def body(self) -> tuple[tuple[Cell, ...], ...]:
        """Every cell as a :class:`Cell`."""
        return tuple(tuple(map(_cell, row)) for row in self.rows)

    @property
    def marks(self) -> set[Mark]:
        """The marks of all cells."""
        return {mark for row in self.body for cell in row for mark in cell.marks}


def measured(value: float, *, floor: bool = False, estimate: bool = False) -> Cell:
    """The cell of a measured value.

    Example:
        >>> str(measured(3e-8, floor=True)), str(measured(float("nan")))
        ('3.00e-08*', 'undefined')
    """
    marks: list[Mark] = ["estimate"] if estimate else []
    return Cell(number(value), (*marks, "floor") if floor else tuple(marks))


def _cell(given: str | Cell) -> Cell:
    return given if isinstance(given, Cell) else Cell(given)
