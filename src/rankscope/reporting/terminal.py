"""Runs and reports for people at a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rankscope.reporting.sparklines import sparkline
from rankscope.runs.checks import CheckStatus, DoctorReport
from rankscope.runs.presenting import show_of, tables_of, text_of
from rankscope.runs.run import Run
from rankscope.runs.summary import Summary, shown_lines, summarise
from rankscope.runs.tables import WordTable
from rankscope.runs.text import FLOOR_MARK, cell, facts_line, floor_line

NARROW_COLUMN = 13
MARKS: Mapping[CheckStatus, tuple[str, str]] = {
    "pass": ("ok", "green"),
    "fail": ("FAIL", "bold red"),
    "refused": ("refused", "yellow"),
    "info": ("info", "cyan"),
}
"""Word and colour of a check; the word alone tells all, for terminals without colour."""

VERDICT_COLOURS: Mapping[str, str] = {
    "healthy": "green",
    "mean offset": "yellow",
    "narrow": "yellow",
    "few directions": "yellow",
    "huge channel": "yellow",
    "huge token": "yellow",
    "clusters": "yellow",
    "same direction": "yellow",
    "copies": "red",
    "collapsing": "red",
    "floor": "magenta",
    "collapsed": "red",
    "vanished": "red",
    "not finite": "red",
}


def print_run(run: Run, console: Console, *, metrics: Sequence[str] | None = None, site: str | None = None) -> None:
    """Table of blocks by metric for every stack, with the course of each metric, then the verdict."""
    plain = not console.encoding.lower().startswith("utf")
    if show_of(run.kind).text != "runs.text:as_text":
        tables = tables_of(run)
        if tables is None:
            print_text(run, console, plain=plain)
        else:
            print_tables(run, tables, console, plain=plain)
        return
    fitting = max(2, (console.width - 8) // NARROW_COLUMN)
    console.print(Text(facts_line(run), style="bold"))
    grids = summarise(run.table, metrics=metrics, site=site, limit=fitting) if run.table.num_rows else []
    for grid in grids:
        console.print(_grid_table(grid, plain=plain))
    if any(grid.floor.any() for grid in grids):
        console.print(Text(floor_line(run), style="magenta"))
    console.print(_verdict_panel(run, plain=plain))
    for note in run.notes:
        console.print(Text(f"note: {note}", style="dim"))


def print_tables(run: Run, tables: list[WordTable], console: Console, *, plain: bool) -> None:
    """The tables of a kind that is read over depth or length, with courses; then the verdict."""
    console.print(Text(facts_line(run), style="bold"))
    for table in tables:
        if table.title:
            console.print(Text(table.title))
        console.print(_word_table(table, plain=plain))
    if any(word.endswith(FLOOR_MARK) for table in tables for row in table.rows for word in row):
        console.print(Text(floor_line(run), style="magenta"))
    console.print(_verdict_panel(run, plain=plain))
    for note in run.notes:
        console.print(Text(f"note: {note}", style="dim"))


def print_text(run: Run, console: Console, *, plain: bool) -> None:
    """A kind that has only its text: sentences wrapped, lines of tables left whole."""
    first, _, rest = text_of(run).partition("\n\n")
    console.print(Text(first, style="bold"))
    console.print(_verdict_panel(run, plain=plain))
    for part in rest.split("\n\n"):
        if part.startswith("Verdict: "):
            continue
        whole = any(line.strip() and not line.strip("- ") for line in part.splitlines())
        console.print(Text(part, style="dim" if part.startswith("Note: ") else ""), soft_wrap=whole)
        console.print()


def _word_table(words: WordTable, *, plain: bool) -> Table:
    shape = box.ASCII if plain else box.SIMPLE_HEAD
    table = Table(box=shape, show_footer=bool(words.down))
    for column, name in enumerate(words.head):
        line = words.down[column] if words.down else None
        course = "" if line is None else sparkline(line, plain=plain, width=NARROW_COLUMN - 2)
        footer = Text("course" if column == 0 else course, style="" if column == 0 else "cyan")
        table.add_column(
            Text(name), justify="left" if words.across and not column else "right", footer=footer, no_wrap=True
        )
    if words.across:
        table.add_column("course", no_wrap=True)
    for position, row in enumerate(words.rows):
        cells = [_styled(word, floor=word.endswith(FLOOR_MARK)) for word in row]
        if words.across:
            course = sparkline(words.across[position], plain=plain, width=NARROW_COLUMN)
            cells.append(Text(course, style="cyan"))
        table.add_row(*cells)
    return table


def _grid_table(grid: Summary, *, plain: bool) -> Table:
    table = Table(box=box.ASCII if plain else box.SIMPLE_HEAD, title=grid.stack, title_justify="left", show_footer=True)
    table.add_column("block", justify="right", footer="course", no_wrap=True)
    for column, metric in enumerate(grid.metrics):
        course = sparkline(grid.values[grid.blocks, column].tolist(), plain=plain, width=NARROW_COLUMN - 2)
        table.add_column(
            Text(metric.replace("_", "\n")), justify="right", footer=Text(course, style="cyan"), no_wrap=True
        )
    for line in shown_lines(len(grid.labels)):
        if line is None:
            table.add_row(*["..."] * (len(grid.metrics) + 1), style="dim")
            continue
        words = [
            _styled(cell(grid, line, column), floor=bool(grid.floor[line, column]))
            for column in range(len(grid.metrics))
        ]
        table.add_row(Text(grid.labels[line], style="dim"), *words)
    return table


def _styled(words: str, *, floor: bool) -> Text:
    return Text(words, style="magenta" if floor else "")


def _verdict_panel(run: Run, *, plain: bool) -> Panel:
    codes = [run.code] if run.code else [str(item["code"]) for item in run.evidence if "code" in item]
    known = [code for code in VERDICT_COLOURS if code in codes]
    colour = VERDICT_COLOURS[known[-1]] if known else "white"
    steps = f"\nNext: {'; '.join(run.next_steps)}" if run.next_steps else ""
    return Panel(
        Text(run.verdict + steps),
        title="verdict",
        title_align="left",
        border_style=colour,
        box=box.ASCII if plain else box.ROUNDED,
    )


def print_doctor(report: DoctorReport, console: Console) -> None:
    """A line per check, and which ones failed."""
    console.print(Text(f"{report.model} ({report.architecture})", style="bold"))
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in report.checks:
        word, colour = MARKS[check.status]
        detail = Text(check.detail, style="" if check.status == "fail" else "dim")
        table.add_row(Text(word, style=colour), Text(check.name), detail)
    console.print(table)
    failed = [check.name for check in report.checks if check.status == "fail"]
    if failed:
        console.print(
            Text(f"{len(failed)} of {len(report.checks)} checks failed: {', '.join(failed)}", style="bold red")
        )
    else:
        refused = sum(check.status == "refused" for check in report.checks)
        console.print(Text(f"no check failed{f', {refused} refused' if refused else ''}", style="green"))


def print_entries(rows: Sequence[Mapping[str, str]], console: Console) -> None:
    """Named things, one per line, the columns in the order of the first one."""
    if not rows:
        console.print("nothing registered")
        return
    table = Table(box=box.ASCII if not console.encoding.lower().startswith("utf") else box.SIMPLE_HEAD)
    for position, name in enumerate(rows[0]):
        table.add_column(name, no_wrap=position == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(word) for word in row.values()))
    console.print(table)
