"""How a doctor's report is shown: one line per check, and which ones failed."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.runs.checks import CheckStatus, DoctorReport
from rankscope.verbs._spec import Answer
from rankscope.views import Cell, Column, Document, Mark, Row, Table

CHECKS: Mapping[CheckStatus, Cell] = {
    "pass": Cell("ok", ("good",)),
    "fail": Cell("FAIL", ("bad",)),
    "refused": Cell("refused", ("care",)),
    "info": Cell("info"),
}
"""Word and colour of a check; the word is enough on terminals without colour."""


def document(report: DoctorReport | Answer) -> Document:
    """One row per check, and how many failed or were refused; or the sizes of a checkpoint."""
    if not isinstance(report, DoctorReport):
        title, _, facts = str(report).partition("\n")
        return Document(title, parts=(facts,))
    columns = [Column("", align="left"), Column("check", align="left"), Column("found", align="left", width="wide")]
    faint: tuple[Mark, ...] = ("faint",)
    rows: list[Row] = [
        [CHECKS[check.status], check.name, Cell(check.detail, () if check.status == "fail" else faint)]
        for check in report.checks
    ]
    failed = [check.name for check in report.checks if check.status == "fail"]
    refused = sum(check.status == "refused" for check in report.checks)
    verdict = f"No check failed{f', {refused} refused' if refused else ''}."
    if failed:
        verdict = f"{len(failed)} of {len(report.checks)} checks failed: {', '.join(failed)}."
    return Document(f"{report.model} ({report.architecture})", verdict, parts=(Table(columns, rows),))
