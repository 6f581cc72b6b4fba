"""Views as HTML for a notebook: all text is escaped, and the colours also suit a dark theme."""

from __future__ import annotations

import html

from rankscope.views.documents import Document, Remark, Section
from rankscope.views.tables import Cell, Table

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
    """One table."""
    aligned = [f"text-align:{column.align};{CELL}" for column in table.head]
    head = "".join(
        f"<th scope='col' style='{style}'>{html.escape(column.name)}</th>"
        for column, style in zip(table.head, aligned, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(_cell(cell, style) for cell, style in zip(row, aligned, strict=True))}</tr>"
        for row in table.body
    )
    caption = ""
    if table.caption:
        words = html.escape(table.caption)
        caption = f"<caption style='text-align:left;white-space:nowrap;{SMALL}'>{words}</caption>"
    style = "border-collapse:collapse;margin:.4em 0"
    return f"<table style='{style}'>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(cell: Cell, style: str) -> str:
    faint = ";opacity:.6" if "floor" in cell.marks or "faint" in cell.marks else ""
    return f"<td style='{style}{faint}'>{html.escape(str(cell))}</td>"
