"""A run as plain text, without rich."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rankscope.runs.summary import Summary, shown_lines, summarise

if TYPE_CHECKING:
    from rankscope.runs.run import Run

FLOOR_MARK = "*"
ESTIMATE_MARK = "~"
NOT_MEASURED = ""
UNDEFINED = "undefined"


def number(value: float) -> str:
    """Three significant digits, without an exponent where that is shorter to read.

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


def cell(grid: Summary, line: int, column: int) -> str:
    """What a cell of a grid reads: a number, marked as an estimate or at the float floor; empty if not measured."""
    if not grid.measured[line, column]:
        return NOT_MEASURED
    estimate = ESTIMATE_MARK if grid.estimate[line, column] else ""
    return estimate + number(float(grid.values[line, column])) + (FLOOR_MARK if grid.floor[line, column] else "")


def floor_line(run: Run) -> str:
    """One line that says where the float format stops."""
    relative, dtype = run.floor.get("relative"), run.floor.get("dtype")
    if not isinstance(relative, (int, float)):
        return ""
    return (
        f"{FLOOR_MARK} at the float floor ({dtype}: relative differences below {number(float(relative))} are rounding)"
    )


def facts_line(run: Run) -> str:
    """Model, precision and inputs in one line."""
    seen = run.provenance
    words = [seen.model]
    if seen.weights_dtype:
        words.append(f"weights {seen.weights_dtype}")
    if seen.arithmetic_dtype and seen.arithmetic_dtype != seen.weights_dtype:
        words.append(f"arithmetic {seen.arithmetic_dtype}")
    if seen.sequences:
        spans = sorted(set(seen.lengths))
        length = f" x {spans[0]}" + (f"-{spans[-1]}" if len(spans) > 1 else "") + " tokens" if spans else ""
        words.append(f"{seen.sequences} sequence{'s' if seen.sequences > 1 else ''}{length}")
    if seen.inputs:
        words.append(f"read: {seen.inputs}")
    if seen.token_policy:
        words.append(f"policy {seen.token_policy}")
    return ", ".join(words)


def verdict_lines(run: Run) -> str:
    """The verdict and, in a line of its own, what to run next."""
    return f"Verdict: {run.verdict}" + (f"\nNext: {'; '.join(run.next_steps)}" if run.next_steps else "")


def as_text(run: Run) -> str:
    """Verdict, then a table of blocks by metric for each stack."""
    parts = [f"{run.kind}: {facts_line(run)}", verdict_lines(run)]
    grids = summarise(run.table) if run.table.num_rows else []
    parts += [(f"{grid.stack}\n" if grid.stack else "") + _text_table(grid) for grid in grids]
    if any(grid.floor.any() for grid in grids):
        parts.append(floor_line(run))
    parts += [f"Note: {note}" for note in run.notes]
    return "\n\n".join(part for part in parts if part)


def _text_table(grid: Summary) -> str:
    head = ["block", *(f"{name}" for name in grid.metrics)]
    lines = [
        ["..." for _ in head]
        if line is None
        else [grid.labels[line], *(cell(grid, line, c) for c in range(len(grid.metrics)))]
        for line in shown_lines(len(grid.labels))
    ]
    widths = [max(len(row[column]) for row in [head, *lines]) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, rule, *lines]
    )
