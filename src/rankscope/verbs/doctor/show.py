"""How a doctor's report is shown: the answer, its evidence, what else was found, and whether to trust the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rankscope.verbs.doctor.checks import AnyFinding, CheckStatus, DoctorReport
from rankscope.views import Cell, Column, Document, Mark, Row, Table

CHECKS: Mapping[CheckStatus, Cell] = {
    "pass": Cell("ok", ("good",)),
    "fail": Cell("FAIL", ("bad",)),
    "refused": Cell("refused", ("care",)),
    "info": Cell("info"),
}
"""Word and colour of a check; the word is enough on terminals without colour."""


def document(report: DoctorReport) -> Document:
    """The answer first; the tables of checks and claims if asked for or if a check failed."""
    parts: list[str | Table] = list(_findings(report))
    parts.append(trust(report))
    if report.details or not report.trusted:
        parts += check_tables(report)
    parts += [f"Next: {step}" for step in next_steps(report)]
    return Document(report.answer, parts=tuple(parts))


def _findings(report: DoctorReport) -> Iterator[str]:
    for number, one in enumerate(report.faults):
        if number:
            also = "Also" if one.certainty == "shown" else "Possibly"
            yield _paragraph(f"{also}: {one.sentence}", one)
        else:
            yield _paragraph("", one)
    for one in report.findings:
        if one.kind != "fault":
            yield _paragraph(f"{one.kind.capitalize()}: {one.sentence}", one, change=False)


def _paragraph(lead: str, one: AnyFinding, *, change: bool = True) -> str:
    shown = "Shown by" if one.certainty == "shown" else "Measured"
    label = "Change:   " if one.tried else "Hint:     "
    lines = [lead, f"{label}{one.change}" if change and one.change else "", f"{shown}: {one.evidence}"]
    return "\n".join(line for line in lines if line and not line.endswith(": "))


def trust(report: DoctorReport) -> str:
    """Whether the numbers can be trusted, in a sentence."""
    name = f"{report.model} ({report.architecture})" if report.model != report.architecture else report.model
    count = len(report.checks)
    if not report.trusted:
        failed = [check.name for check in report.checks if check.status == "fail"]
        return f"{name}: {len(failed)} of {count} checks of rankscope's own numbers failed: {', '.join(failed)}."
    refused = sum(check.status == "refused" for check in report.checks)
    blocks = sum(stack.depth for stack in report.stacks)
    more = f", {refused} refused" if refused else ""
    return f"{name}: {blocks} blocks; the numbers can be trusted ({count} checks, none failed{more})."


def next_steps(report: DoctorReport) -> tuple[str, ...]:
    """The command or call that shows more; none after a fault, which has its change."""
    if not report.stacks or any(one.certainty == "shown" for one in report.faults):
        return ()
    is_spec = report.model != report.architecture
    return (f"rankscope measure {report.model}",) if is_spec else ("print(rankscope.measure(model, inputs))",)


def check_tables(report: DoctorReport) -> list[Table]:
    """The checks of rankscope's own numbers, and what is claimed about the structure."""
    columns = [Column("", align="left"), Column("check", align="left"), Column("found", align="left", width="wide")]
    faint: tuple[Mark, ...] = ("faint",)
    rows: list[Row] = [
        [CHECKS[check.status], check.name, Cell(check.detail, () if check.status == "fail" else faint)]
        for check in report.checks
    ]
    claims: list[Row] = [
        [claim.about, f"{f'{claim.stack}: ' if claim.stack else ''}{claim.says}", Cell(claim.proven_by or "not proven",
         faint if claim.proven_by else ("care",))]
        for claim in report.claims
    ]  # fmt: skip
    proofs = [Column("claim", align="left"), Column("says", align="left", width="wide"),
              Column("proven by", align="left", width="wide")]  # fmt: skip
    return [Table(columns, rows), *([Table(proofs, claims)] if claims else [])]
