"""Views as HTML for a notebook: all text is escaped, and the colours also suit a dark theme."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from rankscope.views.documents import Document, Remark, Section
from rankscope.views.tables import Cell, Table
from rankscope.views.trends import levels

WIDE, HIGH, MOST_POINTS = 64, 16, 64
# Colours come from the page (currentColor), so it stays readable in a dark notebook.
CARD = "border-left:4px solid #4c8bd0;padding:.3em .9em;margin:.4em 0"
CELL = "padding:.15em .7em;font-variant-numeric:tabular-nums;white-space:nowrap"
SMALL = "font-size:.85em;opacity:.75"


def document_html(document: Document) -> str:
    """The whole document; parts that scroll horizontally can be reached with the keyboard."""
    steps = "".join(f"<code>{html.escape(step)}</code><br>" for step in document.next_steps)
    # A document without a verdict has its answer as the title.
    first, *lines = map(html.escape, (document.verdict or document.title).split("\n"))
    title = html.escape(document.title) if document.verdict else ""
    parts = [
        f"<div style='{CARD}'><b>{first}</b><br>{''.join(f'{line}<br>' for line in lines)}{steps}"
        f"<span style='white-space:pre-line;{SMALL}'>{title}</span></div>",
        *map(_part, document.parts),
        *(f"<p style='{SMALL}'>{html.escape(words)}</p>" for words in (*document.explained, *document.notes)),
    ]
    return f"<div class='rankscope' style='overflow-x:auto' tabindex='0'>{''.join(parts)}</div>"


def _part(part: object) -> str:
    if isinstance(part, str):
        return f"<p style='white-space:pre-line'>{html.escape(part)}</p>"
    if isinstance(part, Remark):
        lines = "".join(f"<br><b>{label}</b> {html.escape(text)}" for label, text, _ in part.lines)
        return f"<p style='margin-left:1.2em'>{html.escape(part.sentence)}{lines}</p>"
    if isinstance(part, Table):
        return table_html(part)
    if isinstance(part, Section):
        lead = f"<p style='{SMALL}'>{html.escape(part.lead)}</p>" if part.lead else ""
        return f"<p><b>{html.escape(part.title)}</b></p>{lead}{''.join(map(_part, part.parts))}"
    return ""


def table_html(table: Table) -> str:
    """One table with its trends."""
    aligned = [f"text-align:{column.align};{CELL}" for column in table.head]
    head = "".join(
        f"<th scope='col' style='{style}'>{html.escape(column.name)}</th>"
        for column, style in zip(table.head, aligned, strict=True)
    )
    head += "<th scope='col'>trend</th>" if table.row_trends else ""
    body = ""
    for place, row in enumerate(table.body):
        cells = "".join(_cell(cell, style) for cell, style in zip(row, aligned, strict=True))
        trend = f"<td>{curve_svg(table.row_trends[place])}</td>" if table.row_trends else ""
        body += f"<tr>{cells}{trend}</tr>"
    trends = [column.trend for column in table.head]
    foot = ""
    if any(trend is not None for trend in trends):
        cells = "".join(
            f"<td style='{style}'>{'' if trend is None else curve_svg(trend)}</td>"
            for trend, style in zip(trends[1:], aligned[1:], strict=True)
        )
        foot = f"<tfoot><tr><td style='{aligned[0]};opacity:.75'>trend</td>{cells}</tr></tfoot>"
    caption = ""
    if table.caption:
        words = html.escape(table.caption)
        caption = f"<caption style='text-align:left;white-space:nowrap;{SMALL}'>{words}</caption>"
    style = "border-collapse:collapse;margin:.4em 0"
    return f"<table style='{style}'>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>{foot}</table>"


def _cell(cell: Cell, style: str) -> str:
    faint = ";opacity:.6" if "floor" in cell.marks or "faint" in cell.marks else ""
    return f"<td style='{style}{faint}'>{html.escape(str(cell))}</td>"


def curve_svg(values: Sequence[float]) -> str:
    """``values`` as a small drawing in the colour of the text, broken where a value is missing."""
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
    return f"<svg {size} role='img' aria-label='trend'><path d='{pen}' {stroke}/></svg>"
