"""Runs and reports for people at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rankscope.reporting.sparklines import sparkline
from rankscope.results.ablation import MEASURE, Arm, arms
from rankscope.results.ablation_text import shown_layers
from rankscope.results.checks import CheckStatus, DoctorReport
from rankscope.results.exact_text import exact_rows
from rankscope.results.presenting import DEFAULT, presentation_of, text_of
from rankscope.results.run import Run
from rankscope.results.summary import Summary, shown_lines, stacks_of, summarise
from rankscope.results.text import FLOOR_MARK, cell, facts_line, floor_line, number

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
    "huge channel": "yellow",
    "huge token": "yellow",
    "floor": "magenta",
    "collapsed": "red",
}


def print_run(run: Run, console: Console, *, metrics: Sequence[str] | None = None, site: str | None = None) -> None:
    """Table of blocks by metric for every stack, with the course of each metric, then the verdict."""
    plain = not console.encoding.lower().startswith("utf")
    if run.kind in PRINTERS:
        PRINTERS[run.kind](run, console, plain)
        return
    if presentation_of(run.kind) != DEFAULT:
        console.print(Text(text_of(run)))
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


def print_exact(run: Run, console: Console, plain: bool) -> None:
    """log10 of the residual in each arithmetic, with order and factor; then the verdict."""
    console.print(Text(facts_line(run), style="bold"))
    for stack in stacks_of(run.table):
        head, rows = exact_rows(run, stack)
        table = Table(box=box.ASCII if plain else box.SIMPLE_HEAD, title=stack, title_justify="left")
        for name in head:
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*(_styled(word, floor=word.endswith(FLOOR_MARK)) for word in row))
        console.print(table)
    console.print(
        Text("columns exact to float32: log10 of the residual at block.out; * at the float floor", style="dim")
    )
    console.print(_verdict_panel(run, plain=plain))
    for note in run.notes:
        console.print(Text(f"note: {note}", style="dim"))


def print_ablation(run: Run, console: Console, plain: bool) -> None:
    """Variants down, depth across, for each mask and kind of weights; then the verdict."""
    console.print(Text(facts_line(run), style="bold"))
    groups: dict[tuple[str, str, str | None], list[Arm]] = {}
    for arm in arms(run.table):
        groups.setdefault((arm.weights, arm.mask, arm.stack), []).append(arm)
    for (weights, mask, stack), members in groups.items():
        title = ", ".join(part for part in (stack, f"{weights} weights", f"{mask} mask") if part)
        console.print(_arms_table(f"{MEASURE} at block.out, {title}", members, plain=plain))
    if any(bool(arm.line.any_floor.any()) for members in groups.values() for arm in members):
        console.print(Text(floor_line(run), style="magenta"))
    console.print(_verdict_panel(run, plain=plain))
    for note in run.notes:
        console.print(Text(f"note: {note}", style="dim"))


def _arms_table(title: str, members: list[Arm], *, plain: bool) -> Table:
    table = Table(box=box.ASCII if plain else box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("variant", no_wrap=True)
    chosen = shown_layers(members[0].line.layers.size)
    for position in chosen:
        table.add_column(str(members[0].line.layers[position]), justify="right", no_wrap=True)
    table.add_column("course", no_wrap=True)
    for arm in members:
        words = [
            _styled(
                number(float(arm.line.mean[i])) + FLOOR_MARK * bool(arm.line.any_floor[i]),
                floor=bool(arm.line.any_floor[i]),
            )
            for i in chosen
        ]
        course = sparkline(arm.line.mean.tolist(), plain=plain, width=NARROW_COLUMN)
        table.add_row(Text(arm.variant), *words, Text(course, style="cyan"))
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
    codes = [str(item["code"]) for item in run.evidence if "code" in item]
    known = [code for code in VERDICT_COLOURS if code in codes]
    colour = VERDICT_COLOURS[known[-1]] if known else "white"
    return Panel(
        Text(run.verdict),
        title="verdict",
        title_align="left",
        border_style=colour,
        box=box.ASCII if plain else box.ROUNDED,
    )


PRINTERS: Mapping[str, Callable[[Run, Console, bool], None]] = {"ablate": print_ablation, "exact": print_exact}
"""Kinds with a coloured table of their own; another kind prints its text."""


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
