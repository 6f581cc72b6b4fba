"""Views in a terminal, with rich: the same tables as in plain text, with colour and small curves."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from rankscope.views.documents import Document, Remark, Section
from rankscope.views.palette import TONES
from rankscope.views.tables import Cell, Column, Mark, Table
from rankscope.views.trends import sparkline

TREND_WIDTH = 9
WORDS_WIDTH = 30
"""Least width of a column of words, if it has that many."""
MARK_STYLES: dict[Mark, str] = {
    "floor": TONES["floor"],
    "good": TONES["good"],
    "care": TONES["care"],
    "bad": f"bold {TONES['bad']}",
    "faint": "dim",
}


def print_document(document: Document, console: Console, *, tone: str = "plain") -> None:
    """Print the parts, the verdict in a frame coloured by ``tone``, then notes; the end is what stays visible."""
    if document.title:
        _print_words(document.title, console, style="bold")
    for part in document.parts:
        print_part(part, console)
    for words in document.explained:
        console.print(Text(words, style=TONES["floor"]))
    if document.verdict:
        steps = f"\nNext: {'; '.join(document.next_steps)}" if document.next_steps else ""
        shape = box.ASCII if is_plain(console) else box.ROUNDED
        frame = Panel(
            Text(document.verdict + steps), title="verdict", title_align="left", border_style=TONES[tone], box=shape
        )
        console.print(frame)
    for note in document.notes:
        console.print(Text(f"note: {note}", style="dim"))


def print_part(part: object, console: Console) -> None:
    """Print a paragraph, a table under its caption, or a section; charts are skipped."""
    if isinstance(part, str):
        _print_words(part, console)
    elif isinstance(part, Remark):
        _print_remark(part, console)
    elif isinstance(part, Table):
        if part.caption:
            console.print(Text(part.caption))
        print_table(part, console)
    elif isinstance(part, Section):
        console.print(Text(part.title, style="bold"))
        if part.lead:
            _print_words(part.lead, console)
        for inner in part.parts:
            print_part(inner, console)
        console.print()


def _print_remark(remark: Remark, console: Console) -> None:
    """The sentence, and its lines indented with a hanging indent."""
    if remark.sentence:
        _print_words(remark.sentence, console)
    wide = max((len(label) for label, *_ in remark.lines), default=0) + 4
    for label, text, mark in remark.lines:
        style = MARK_STYLES.get(mark, "") if mark else ""
        _print_words(text, console, style=style, head=f"  {label}:".ljust(wide))
    console.print()


def _print_words(text: str, console: Console, *, style: str = "", head: str = "") -> None:
    """Wrapped words, the first line after ``head`` and the others below its end; no line ends with blanks."""
    for line in Text(text, style=style).wrap(console, max(20, console.width - len(head)), overflow="fold"):
        line.rstrip()
        console.print(Text(head, style=style) + line)
        head = " " * len(head)


def print_table(table: Table, console: Console) -> None:
    """Print one table; columns that do not fit are left out and named below it."""
    plain = is_plain(console)
    columns = _fitting(table, console.width, plain=plain)
    console.print(_rich_table(table, columns, plain=plain))
    omitted = [column.name for place, column in enumerate(table.head) if place not in columns]
    if omitted:
        words = f"Left out at a width of {console.width}: {', '.join(omitted)}. COLUMNS=200 shows them."
        console.print(Text(words, style="dim"))


def is_plain(console: Console) -> bool:
    """Whether the terminal shows ASCII only."""
    return not console.encoding.lower().startswith("utf")


def _fitting(table: Table, width: int, *, plain: bool) -> list[int]:
    """The columns that fit: of those with the highest ``spare``, the last is left out first, and the first stays."""
    gap = 3 if plain else 2
    needed = [_needed(table, place) + gap for place in range(len(table.head))]
    room = width - 2 - (TREND_WIDTH + gap if table.row_trends else 0)
    columns = list(range(len(needed)))
    while len(columns) > 2 and sum(needed[place] for place in columns) > room:
        columns.remove(max(columns[1:], key=lambda place: (table.head[place].spare, place)))
    return columns


def _needed(table: Table, place: int) -> int:
    column = table.head[place]
    cells = max((len(str(row[place])) for row in table.body), default=0)
    name = column.name if column.width else max(_broken(column.name).split("\n"), key=len)
    trend = 0 if column.trend is None else min(TREND_WIDTH, len(column.trend))
    return max(trend, len(name), min(cells, WORDS_WIDTH) if column.width else cells)


def _broken(name: str) -> str:
    """Break a long name into several lines."""
    return re.sub(r"[_ ]", "\n", name) if len(name) > TREND_WIDTH else name


def _rich_table(table: Table, columns: Sequence[int], *, plain: bool) -> RichTable:
    shape = box.ASCII if plain else box.SIMPLE_HEAD
    trends = any(column.trend is not None for column in table.head)
    made = RichTable(box=shape, show_footer=trends, padding=(0, 1) if plain else (0, 1, 0, 0))
    for place in columns:
        column = table.head[place]
        made.add_column(
            Text(column.name if column.width else _broken(column.name)),
            justify=column.align,
            footer=_footer(column, first=place == 0, plain=plain),
            no_wrap=not column.width,
            overflow="fold",
        )
    if table.row_trends:
        made.add_column("trend", no_wrap=True)
    for row, cells in enumerate(table.body):
        words = [_styled(cells[place]) for place in columns]
        if table.row_trends:
            words.append(Text(sparkline(table.row_trends[row], plain=plain, width=TREND_WIDTH), style="cyan"))
        made.add_row(*words)
    return made


def _footer(column: Column, *, first: bool, plain: bool) -> Text:
    if first:
        return Text("trend")
    trend = "" if column.trend is None else sparkline(column.trend, plain=plain, width=TREND_WIDTH)
    return Text(trend, style="cyan")


def _styled(cell: Cell) -> Text:
    return Text(str(cell), style=next((MARK_STYLES[mark] for mark in cell.marks if mark in MARK_STYLES), ""))
