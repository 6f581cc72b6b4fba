"""A run in a notebook: the verdict, tables with a small curve per column or row, and nothing that is not escaped."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import numpy as np

from rankscope.runs.courses import levels
from rankscope.runs.presenting import tables_of, text_of
from rankscope.runs.text import FLOOR_MARK, facts_line, floor_line

if TYPE_CHECKING:
    from rankscope.runs.run import Run
    from rankscope.runs.tables import Course, WordTable

WIDE, HIGH, MOST_POINTS = 64, 16, 64
# Colours come from the page (currentColor), so that a dark notebook stays readable.
CARD = "border-left:4px solid #4c8bd0;padding:.3em .9em;margin:.4em 0"
CELL = "text-align:right;padding:.15em .7em;font-variant-numeric:tabular-nums;white-space:nowrap"
SMALL = "font-size:.85em;opacity:.75"


def _next_steps(run: Run) -> str:
    return "".join(f"<code>{html.escape(step)}</code><br>" for step in run.next_steps)


def as_html(run: Run) -> str:
    """The run for a notebook; a kind without tables shows its text."""
    parts = [
        f"<div style='{CARD}'><b>{html.escape(run.verdict)}</b><br>{_next_steps(run)}"
        f"<span style='{SMALL}'>{html.escape(f'{run.kind}: {facts_line(run)}')}</span></div>"
    ]
    tables = tables_of(run)
    if tables is None:
        text = text_of(run).partition("\n\n")[2].partition("\n\n")[2]
        parts.append(f"<pre style='overflow-x:auto;line-height:1.35'>{html.escape(text)}</pre>")
        return _whole(parts)
    parts += [_table(table) for table in tables]
    if any(word.endswith(FLOOR_MARK) for table in tables for row in table.rows for word in row):
        parts.append(f"<p style='{SMALL}'>{html.escape(floor_line(run))}</p>")
    parts += [f"<p style='{SMALL}'>{html.escape(note)}</p>" for note in run.notes]
    return _whole(parts)


def _whole(parts: list[str]) -> str:
    # What scrolls sideways can be reached with the keyboard.
    return f"<div class='rankscope' style='overflow-x:auto' tabindex='0'>{''.join(parts)}</div>"


def _table(table: WordTable) -> str:
    head = [*table.head, *(["course"] if table.across else [])]
    lines = ["".join(f"<th scope='col' style='{CELL}'>{html.escape(word)}</th>" for word in head)]
    for number, row in enumerate(table.rows):
        words = "".join(_cell(word) for word in row)
        lines.append(words + (f"<td>{curve_svg(table.across[number])}</td>" if table.across else ""))
    body = "".join(f"<tr>{line}</tr>" for line in lines[1:])
    foot = ""
    if table.down:
        cells = (f"<td style='{CELL}'>{'' if line is None else curve_svg(line)}</td>" for line in table.down[1:])
        foot = f"<tfoot><tr><td style='{CELL};opacity:.75'>course</td>{''.join(cells)}</tr></tfoot>"
    caption = f"<caption style='text-align:left;{SMALL}'>{html.escape(table.title)}</caption>" if table.title else ""
    style = "border-collapse:collapse;margin:.4em 0"
    return f"<table style='{style}'>{caption}<thead><tr>{lines[0]}</tr></thead><tbody>{body}</tbody>{foot}</table>"


def _cell(word: str) -> str:
    faint = ";opacity:.6" if word.endswith(FLOOR_MARK) else ""
    return f"<td style='{CELL}{faint}'>{html.escape(word.replace('...', '…'))}</td>"


def curve_svg(values: Course) -> str:
    """The course of ``values`` as a small drawing in the colour of the text, broken where a value is missing."""
    heights = levels(values, MOST_POINTS)
    if not heights.size:
        return ""
    step = (WIDE - 4) / max(1, heights.size - 1)
    points = [None if np.isnan(y) else (2 + i * step, 2 + (HIGH - 4) * (1 - y)) for i, y in enumerate(heights)]
    pen = ""
    for before, point in zip([None, *points], points, strict=False):
        if point is not None:
            pen += f"{'M' if before is None else 'L'}{point[0]:.1f} {point[1]:.1f}"
    size = f"width='{WIDE}' height='{HIGH}' viewBox='0 0 {WIDE} {HIGH}'"
    stroke = "fill='none' stroke='currentColor' stroke-width='1.6' stroke-linecap='round' stroke-linejoin='round'"
    return f"<svg {size} role='img' aria-label='course'><path d='{pen}' {stroke}/></svg>"
