"""How a doctor's report is shown: the answer, its evidence, what else was found, and whether to trust the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rankscope.verbs.doctor.checks import CheckStatus, DoctorReport
from rankscope.views import Cell, Column, Document, Mark, Part, Remark, Row, Table

if TYPE_CHECKING:
    from rankscope.examination.findings import Finding

CHECKS: Mapping[CheckStatus, Cell] = {
    "pass": Cell("ok", ("good",)),
    "fail": Cell("FAIL", ("bad",)),
    "refused": Cell("refused", ("care",)),
    "info": Cell("info"),
}
"""Word and colour of a check; the word is enough on terminals without colour."""


def document(report: DoctorReport) -> Document:
    """The answer first; the tables of checks and claims if asked for, or if nothing else says why a check failed."""
    parts: list[Part] = list(_findings(report))
    parts.append(trust(report))
    has_cause = any(one.certainty == "shown" for one in report.faults)
    if report.details or not (report.trusted or has_cause):
        parts += check_tables(report)
    parts += [f"Next: {step}" for step in next_steps(report)]
    return Document(report.answer, parts=tuple(parts))


def _findings(report: DoctorReport) -> Iterator[Remark]:
    for number, one in enumerate(report.faults):
        also = "Also" if one.certainty == "shown" else "Possibly"
        yield _remark(f"{also}: {one.sentence}" if number else "", one)
    for one in report.findings:
        if one.kind != "fault":
            yield _remark(f"{one.kind.capitalize()}: {one.sentence}", one, change=False)


def _remark(sentence: str, one: Finding, *, change: bool = True) -> Remark:
    lines: list[tuple[str, str, Mark | None]] = []
    if change and one.change:
        lines.append(("Change", one.change, "good") if one.tried else ("Hint", one.change, None))
    if one.evidence:
        lines.append(("Shown by" if one.certainty == "shown" else "Measured", one.evidence, None))
    return Remark(sentence, tuple(lines))


def trust(report: DoctorReport) -> str:
    """Whether the numbers can be trusted, in a sentence."""
    name = f"{report.model} ({report.architecture})" if report.model != report.architecture else report.model
    if not report.trusted:
        failed = [check.name for check in report.checks if check.status == "fail"]
        return f"{name}: the numbers cannot be trusted; these checks of them failed: {', '.join(failed)}."
    if not report.stacks:
        return f"{name}: no blocks were found that measure can read (--details says why); all else was examined."
    blocks = sum(stack.depth for stack in report.stacks)
    return f"{name}: {blocks} blocks; the numbers can be trusted."


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
