"""Prints runs, checks and lists to a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from rankscope.reporting.states import state_of
from rankscope.runs.checks import CheckStatus, DoctorReport
from rankscope.runs.presenting import document_of
from rankscope.runs.run import Run
from rankscope.views import Cell, Column, Mark, Row, Table
from rankscope.views.terminal import MARK_STYLES, print_document, print_table

CHECKS: Mapping[CheckStatus, Cell] = {
    "pass": Cell("ok", ("good",)),
    "fail": Cell("FAIL", ("bad",)),
    "refused": Cell("refused", ("care",)),
    "info": Cell("info"),
}
"""Word and colour of a check; the word is enough on terminals without colour."""


def print_run(run: Run, console: Console) -> None:
    """Print the same tables as ``print(run)``, with the trend of each metric, then the verdict."""
    print_document(document_of(run), console, tone=state_of(run)[0])


def print_doctor(report: DoctorReport, console: Console) -> None:
    """Print one line per check, and which ones failed."""
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
        console.print(Text(words, style=MARK_STYLES["bad"]))
    else:
        refused = sum(check.status == "refused" for check in report.checks)
        console.print(Text(f"no check failed{f', {refused} refused' if refused else ''}", style=MARK_STYLES["good"]))


def print_entries(rows: Sequence[Mapping[str, str]], console: Console) -> None:
    """Print named entries, one per line, with the columns in the order of the first one."""
    if not rows:
        console.print("nothing registered")
        return
    columns = [Column(name, align="left", width="" if place == 0 else "wide") for place, name in enumerate(rows[0])]
    print_table(Table(columns, [list(row.values()) for row in rows]), console)
