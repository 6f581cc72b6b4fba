"""Runs, checks and lists for people at a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from rankscope.runs.checks import CheckStatus, DoctorReport
from rankscope.runs.presenting import document_of
from rankscope.runs.run import Run
from rankscope.views import Cell, Column, Mark, Row, Table
from rankscope.views.palette import BAD, CARE, FLOOR, GOOD, PLAIN
from rankscope.views.terminal import print_document, print_table

CHECKS: Mapping[CheckStatus, Cell] = {
    "pass": Cell("ok", ("good",)),
    "fail": Cell("FAIL", ("bad",)),
    "refused": Cell("refused", ("care",)),
    "info": Cell("info"),
}
"""Word and colour of a check; the word alone tells all, for terminals without colour."""

VERDICT_COLOURS: Mapping[str, str] = {
    "healthy": GOOD,
    "mean offset": CARE,
    "narrow": CARE,
    "few directions": CARE,
    "huge channel": CARE,
    "huge token": CARE,
    "clusters": CARE,
    "same direction": CARE,
    "copies": BAD,
    "collapsing": BAD,
    "floor": FLOOR,
    "collapsed": BAD,
    "vanished": BAD,
    "not finite": BAD,
}
"""Milder to graver; ``narrow`` is what older runs call few directions."""


def print_run(run: Run, console: Console) -> None:
    """The same tables as ``print(run)``, with the trend of each metric, then the verdict."""
    codes = [run.code] if run.code else [str(item["code"]) for item in run.evidence if "code" in item]
    known = [code for code in VERDICT_COLOURS if code in codes]
    print_document(document_of(run), console, colour=VERDICT_COLOURS[known[-1]] if known else PLAIN)


def print_doctor(report: DoctorReport, console: Console) -> None:
    """A line per check, and which ones failed."""
    console.print(Text(f"{report.model} ({report.architecture})", style="bold"))
    columns = [Column("", align="left"), Column("check", align="left"), Column("found", align="left", width="wide")]
    faint: tuple[Mark, ...] = ("faint",)
    rows: list[Row] = [
        [CHECKS[check.status], check.name, Cell(check.detail, () if check.status == "fail" else faint)]
        for check in report.checks
    ]
    print_table(Table(columns, rows), console)
    failed = [check.name for check in report.checks if check.status == "fail"]
    if failed:
        words = f"{len(failed)} of {len(report.checks)} checks failed: {', '.join(failed)}"
        console.print(Text(words, style=f"bold {BAD}"))
    else:
        refused = sum(check.status == "refused" for check in report.checks)
        console.print(Text(f"no check failed{f', {refused} refused' if refused else ''}", style=GOOD))


def print_entries(rows: Sequence[Mapping[str, str]], console: Console) -> None:
    """Named things, one per line, the columns in the order of the first one."""
    if not rows:
        console.print("nothing registered")
        return
    columns = [Column(name, align="left", width="" if place == 0 else "wide") for place, name in enumerate(rows[0])]
    print_table(Table(columns, [list(row.values()) for row in rows]), console)
