"""The chapter of a doctor's report: the answer, the two curves that show it, what else was found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rankscope.reporting.page.charts import Chart, Views, plain_list
from rankscope.reporting.page.rendering import Chapter
from rankscope.reporting.page.safe_text import clipped, visible
from rankscope.verbs.doctor.checks import DoctorReport
from rankscope.verbs.doctor.show import check_tables, next_steps, trust
from rankscope.views import Column, Row, Section, Table
from rankscope.views.charts import spans_decades

if TYPE_CHECKING:  # printing needs no torch
    from rankscope.examination.findings import Finding


def doctor_chapter(report: DoctorReport) -> Chapter:
    """The answer as the headline, its change and numbers below it, then the picture and everything else."""
    first = report.faults[0] if report.faults else None
    shown = first is not None and first.certainty == "shown"
    told = [] if first is None else _told(first)
    forward, backward = report.passes
    return Chapter(
        title=f"doctor · {visible(report.model)}",
        question="What is wrong with this model, and what to change?",
        state="bad" if shown or not report.trusted else "good",
        headline=visible(report.answer),
        verdict=[visible(words) for words in told],
        tiles=[
            ("blocks", str(sum(stack.depth for stack in report.stacks))),
            ("passes", f"{forward} forward, {backward} backward; {report.structure_passes} for the structure"),
            ("checks", f"{len(report.checks)}, {sum(check.status == 'fail' for check in report.checks)} failed"),
        ],
        sections=tuple(_sections(report)),
        next_steps=next_steps(report),
    )


def _told(one: Finding) -> list[str]:
    how = "Shown by" if one.certainty == "shown" else "Measured"
    advice = f"{'Change' if one.tried else 'Hint'}: {one.change}"
    return [advice] * bool(one.change) + [f"{how}: {one.evidence}"] * bool(one.evidence)


def _sections(report: DoctorReport) -> Iterator[Section]:
    drawn = [one for one in report.faults if one.curves[0]]
    numbered = [one for one in report.faults if one.after is not None and not one.curves[0]]
    charts = [make(found) for make, found in ((_chart, drawn), (_bars, numbered)) if found]
    if charts:
        yield Section("As it is, and with the change", "The same weights and inputs.", tuple(charts))
    others = [one for one in report.findings if one not in report.faults[:1]]
    if others:
        yield Section("What else was found", "", (_others(others),))
    tables = [
        replace(table, caption=caption, folded=True)
        for table, caption in zip(check_tables(report), ("Checks", "Claims, and what proves them"), strict=False)
    ]
    yield Section("Can the numbers be trusted?", visible(trust(report)), tuple(tables))


def _others(findings: list[Finding]) -> Table:
    columns = [Column("", align="left"), *(Column(name, align="left", width="wide") for name in ("found", "measured"))]
    kinds = {"shown": "also", "possible": "possibly"}
    rows: list[Row] = [
        [
            kinds[one.certainty] if one.kind == "fault" else one.kind,
            visible(f"{one.sentence} {one.change}".strip()),
            visible(one.evidence),
        ]
        for one in findings
    ]
    return Table(columns, rows)


def _chart(drawn: list[Finding]) -> Chart:
    views: Views = {}
    for one in drawn:
        series: list[dict[str, Any]] = [
            {"name": name, "x": list(range(len(values))), "y": plain_list(values), "low": [], "high": [], "floor": []}
            for name, values in zip(("as it is", "changed"), one.curves, strict=True)
        ]
        log = spans_decades(value for line in series for value in line["y"])
        measured = clipped(one.measured.replace("after the last block", "after each block"), 100)
        views[one.code,] = {"metric": measured, "series": series, "guides": [], "log": log, "form": "number"}
    changes = "; ".join(one.intervention for one in drawn)
    return Chart("lines", "Before and after", f"Changed: {visible(changes)}.", ("cause",), views)


def _bars(numbered: list[Finding]) -> Chart:
    """The two numbers of each fault."""
    views: Views = {}
    for one in numbered:
        values = plain_list([float("nan") if value is None else value for value in (one.before, one.after)])
        views[one.code,] = {
            "metric": clipped(one.measured, 100),
            "xlabel": "",
            "x": ["as it is", clipped(one.intervention, 60)],
            "y": values,
            "low": values,
            "high": values,
            "counts": [],
        }
    return Chart(
        "bars", "Before and after", "The model as it is, and with the change (or as expected).", ("cause",), views
    )
