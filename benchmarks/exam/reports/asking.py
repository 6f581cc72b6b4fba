"""Ask the doctor about every report and its healthy twin, make the printed change, and count what came of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import rankscope as rs
from benchmarks.exam.reports.further import FURTHER
from benchmarks.exam.reports.parts import Case
from benchmarks.exam.reports.patterns import PATTERNS, Pattern
from benchmarks.exam.reports.printed import NotLiteralError, applied
from rankscope.examination import Finding

TABLE = Path(__file__).resolve().parents[3] / "docs" / "data" / "threads.inc"


def asked(case: Case) -> Any:
    """The report of the doctor."""
    given = case.arguments()
    return rs.doctor(case.model, rs.Inputs(case.inputs, axes=given.pop("axes", None)), **given)


def shown(findings: tuple[Finding, ...]) -> list[str]:
    """Codes of the faults that are shown."""
    return [one.code for one in findings if one.kind == "fault" and one.certainty == "shown"]


def tried(pattern: Pattern) -> dict[str, Any]:
    """Everything that is recorded about one report."""
    start = time.perf_counter()
    report = asked(pattern.broken())
    seconds = time.perf_counter() - start
    twin = asked(pattern.healthy())
    first = report.faults[0].code if report.faults else None
    harmless = [one.code for one in report.findings if one.kind != "fault"]
    if pattern.codes:
        right = first in pattern.codes
    else:
        right = not shown(report.findings) and pattern.harmless <= set(harmless)
    before, after, not_literal = pattern.symptom(pattern.broken()), None, ""
    if report.faults:
        try:
            after = pattern.symptom(applied(report.faults[0].change, pattern.broken()))
        except NotLiteralError as error:
            not_literal = str(error)
    return {
        "number": pattern.number,
        "thread": pattern.thread,
        "words": pattern.words,
        "first": first,
        "right": right,
        "has_fault": bool(pattern.codes),
        "literal": after is not None,
        "not_literal": not_literal,
        "symptom": [before, after],
        "fixed": bool(pattern.codes) and after is not None and not pattern.gone(before) and pattern.gone(after),
        "twin": shown(twin.findings),
        "twin_possible": [one.code for one in twin.faults if one.certainty == "possible"],
        "passes": list(report.passes),
        "seconds": round(seconds, 1),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, int]:
    """The three numbers."""
    return {
        "reports": len(rows),
        "first finding right": sum(row["right"] for row in rows),
        "with a fault": sum(row["has_fault"] for row in rows),
        "printed change applied literally": sum(row.get("literal", False) for row in rows if row["has_fault"]),
        "fixed by the printed change": sum(row["fixed"] for row in rows),
        "twins without a shown fault": sum(not row["twin"] for row in rows),
        "twins without any finding of a fault": sum(not row["twin"] and not row["twin_possible"] for row in rows),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The three numbers and the rows in Markdown."""
    told = summary(rows)
    lines = [
        f"The first finding is right in {told['first finding right']} of {told['reports']} reports. Of the "
        f"{told['with a fault']} that have a fault, the printed change could be made as it stands in "
        f"{told['printed change applied literally']}, and the symptom went away in "
        f"{told['fixed by the printed change']}. No fault is claimed on "
        f"{told['twins without a shown fault']} of {told['reports']} healthy twins.",
        "",
        "| report | symptom | first finding | symptom before | after the change |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        before, after = row["symptom"]
        numbers = (f"{before:.3g}", f"{after:.3g}" if after is not None else "") if row["has_fault"] else ("", "")
        found = row["first"].replace("_", " ") if row["first"] else "nothing wrong"
        mark = "" if row["right"] else " (not right)"
        link = f"[{row['thread']}](https://github.com/{row['thread'].replace('#', '/issues/')})"
        lines.append(f"| {link} | {row['words']} | {found}{mark} | {numbers[0]} | {numbers[1]} |")
    return "\n".join(lines) + "\n"


def ask(names: list[str], *, write: bool) -> None:
    """Ask about the reports that are named by number, or all; write the tables of the docs."""
    for chosen, place in ((PATTERNS, TABLE), (FURTHER, TABLE.with_name("threads_further.inc"))):
        rows = []
        for pattern in chosen:
            if names and pattern.number not in names:
                continue
            row = tried(pattern)
            rows.append(row)
            print(row["number"], "right" if row["right"] else "WRONG", row["first"], row["symptom"], row["fixed"],
                  row["not_literal"], "twin", row["twin"], row["twin_possible"], row["passes"], row["seconds"],
                  flush=True)  # fmt: skip
        if rows:
            print(json.dumps(summary(rows), indent=1))
        if write and not names:
            place.write_text(table(rows))
