"""Views as plain text, with the same cells as every other renderer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rankscope.views.documents import Document, Remark, Section
from rankscope.views.tables import Table


def document_text(document: Document) -> str:
    """Title, verdict, parts, legend and notes, separated by blank lines."""
    verdict = f"Verdict: {document.verdict}" if document.verdict else ""
    steps = f"\nNext: {'; '.join(document.next_steps)}" if document.next_steps else ""
    parts = [document.title, verdict + steps, *map(part_text, document.parts), *document.explained]
    parts += [f"Note: {note}" for note in document.notes]
    return "\n\n".join(part for part in parts if part)


def part_text(part: object) -> str:
    """A paragraph, a table under its caption, or a section; a chart has no text."""
    if isinstance(part, str):
        return part
    if isinstance(part, Remark):
        wide = max((len(label) for label, *_ in part.lines), default=0) + 2
        return _lines([part.sentence, *(f"{label}:".ljust(wide) + text for label, text, _ in part.lines)])
    if isinstance(part, Table):
        return _lines([part.caption, table_text(part)])
    if isinstance(part, Section):
        return _lines([part.title, part.lead, *map(part_text, part.parts)])
    return ""


def table_text(table: Table) -> str:
    """The aligned table, without its caption.

    Example:
        >>> print(table_text(Table(["block", "residual"], [["0", "0.93"], ["1", "0.4"]])))
        block  residual
        -----  --------
            0      0.93
            1       0.4
    """
    rows = [[column.name for column in table.head], *([str(cell) for cell in row] for row in table.body)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.columns))]
    rows.insert(1, ["-" * width for width in widths])
    left = [column.align == "left" for column in table.head]
    return "\n".join(_aligned(row, widths, left) for row in rows)


def markdown_text(table: Table) -> str:
    """The table in Markdown, without its caption.

    Example:
        >>> print(markdown_text(Table(["block", "residual"], [["0", "0.93"]])))
        | block | residual |
        |---|---|
        | 0 | 0.93 |
    """
    rows = [[column.name for column in table.head], *([str(cell) for cell in row] for row in table.body)]
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows]
    return "\n".join([lines[0], "|---" * len(table.columns) + "|", *lines[1:]])


def _aligned(row: Sequence[str], widths: Sequence[int], left: Sequence[bool]) -> str:
    words = (
        word.ljust(width) if to_left else word.rjust(width)
        for word, width, to_left in zip(row, widths, left, strict=True)
    )
    return "  ".join(words).rstrip()


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(part for part in parts if part)
