"""Ask the doctor about every report and its healthy twin, apply the printed fix, and write what came of it.

``python -m benchmarks.threads --write`` records the results in ``docs/data/threads.json`` and the table of the docs;
``--draw`` draws the recorded curves before and after the change, and two losses by step.
"""

from __future__ import annotations

import argparse
import json
import textwrap
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import rankscope as rs
from benchmarks.threads.further import FURTHER
from benchmarks.threads.parts import Case, Classifier, encoder, losses, signals
from benchmarks.threads.patterns import PATTERNS, Pattern, seeded
from benchmarks.threads.printed import NotLiteralError, applied
from rankscope.examination import Finding

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "data" / "threads.json"
TABLE = ROOT / "docs" / "data" / "threads.inc"
FIGURE = ROOT / "docs" / "_static" / "figures" / "solved_reports.png"
DRAWN = ("2", "3", "6", "23")
"""Reports whose curves are drawn: those that are about how much tokens differ, one for each cause."""


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
        "answer": report.answer,
        "change": report.faults[0].change if report.faults else "",
        "evidence": report.faults[0].evidence if report.faults else "",
        "others": [one.code for one in report.findings][1:],
        "right": right,
        "has_fault": bool(pattern.codes),
        "literal": after is not None,
        "not_literal": not_literal,
        "symptom": [before, after],
        "curves": [list(curve) for curve in report.faults[0].curves or ()] if report.faults else [],
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


class AtLn4(Classifier):
    """A ReLU on scores that are all negative: every class gets the same one."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x) - 5)


@seeded
def four_classes(make: type[Classifier]) -> Case:
    """A classifier of four classes."""
    x, y = signals()
    return Case(make(encoder(32, 2, 2), features=8, width=32, classes=4), x, y, F.cross_entropy)


def losses_drawn() -> dict[str, list[list[float]]]:
    """The loss by step of two reports, as the model is and with the change."""
    (still,) = (pattern for pattern in PATTERNS if pattern.number == "30")
    pairs = {"ln4": map(four_classes, (AtLn4, Classifier)), "still": (still.broken(), still.healthy())}
    return {name: [losses(case, 60) for case in pair] for name, pair in pairs.items()}


def draw(rows: list[dict[str, Any]]) -> None:
    """What is measured in four reports, as the model is and with the change, and a small picture of each report."""
    from matplotlib.figure import Figure

    chosen = {row["number"]: row for row in rows}
    figure = Figure(figsize=(7.2, 5.4), layout="constrained")
    for axis, number in zip(figure.subplots(2, 2, sharey=True).flat, DRAWN, strict=True):
        row = chosen[number]
        _draw_pair(axis, row["curves"], "block", "relative residual", log=True)
        axis.set_title(textwrap.fill(row["words"], 38), fontsize=10, loc="left")
        axis.text(0.02, 0.04, row["thread"], transform=axis.transAxes, fontsize=7, color="#5b6675")
        axis.set_ylim(1e-8, 5)
    figure.savefig(FIGURE, dpi=120)
    found = losses_drawn()
    for name, curves in (*found.items(), ("same", chosen["6"]["curves"]), ("deep", chosen["2"]["curves"])):
        figure = Figure(figsize=(3.6, 2.1), layout="constrained")
        is_loss = name in found
        xlabel, ylabel = ("step", "loss (nats)") if is_loss else ("block", "relative residual")
        _draw_pair(figure.subplots(), curves, xlabel, ylabel, log=not is_loss)
        figure.savefig(FIGURE.with_name(f"solved_{name}.png"), dpi=120)


def _draw_pair(axis: Any, curves: list[list[float]], xlabel: str, ylabel: str, *, log: bool) -> None:
    looks = (("#d55e00", "as it is"), ("#0072b2", "changed"))
    for curve, (colour, name) in zip(curves, looks, strict=True):
        axis.plot(curve, color=colour, marker="o" if len(curve) < 30 else "", markersize=3)
        end = (len(curve) - 1, curve[-1])
        axis.annotate(name, end, (6, 0), textcoords="offset points", va="center", color=colour)
    if log:
        axis.set_yscale("log")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Run the reports that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*")
    parser.add_argument("--further", action="store_true", help="the ten reports that were written last")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--draw", action="store_true", help="only draw")
    parser.add_argument("--record", type=Path, default=RECORD, help="where to write")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.draw:
        draw(json.loads(given.record.read_text())["reports"]["rows"])
        return
    chosen = FURTHER if given.further else PATTERNS
    rows = []
    for pattern in chosen:
        if given.numbers and pattern.number not in given.numbers:
            continue
        rows.append(tried(pattern))
        row = rows[-1]
        print(row["number"], "right" if row["right"] else "WRONG", row["first"], row["symptom"], row["fixed"],
              row["not_literal"], "twin", row["twin"], row["twin_possible"], row["passes"], row["seconds"],
              flush=True)  # fmt: skip
        if given.write:
            numbers = [pattern.number for pattern in chosen]
            record([row], "further" if given.further else "reports", numbers, given.record)
    print(json.dumps(summary(rows), indent=1))


def record(rows: list[dict[str, Any]], kind: str, numbers: list[str], place: Path = RECORD) -> None:
    """Write the rows, with those of other reports that were recorded before."""
    kept = json.loads(place.read_text()) if place.exists() else {}
    known = {row["number"]: row for row in (*kept.get(kind, {}).get("rows", ()), *rows)}
    merged = [known[number] for number in numbers if number in known]
    kept[kind] = {"date": date.today().isoformat(), "summary": summary(merged), "rows": merged}
    place.write_text(json.dumps(kept, indent=1) + "\n")
    if place != RECORD:
        return
    (TABLE if kind == "reports" else TABLE.with_name("threads_further.inc")).write_text(table(merged))


if __name__ == "__main__":
    main()
