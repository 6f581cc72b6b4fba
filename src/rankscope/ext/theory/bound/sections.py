"""Sections of ``bound``: whether each theorem applies, its bound, the measured value, and the margin between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope.reporting.page.charts import Chart, Views, line_view
from rankscope.reporting.page.facts import source_words
from rankscope.reporting.page.rows_section import own_names, rows_section, values_of
from rankscope.reporting.page.safe_text import clipped, spoken
from rankscope.reporting.page.sections import section
from rankscope.runs.curves import Curve, curve, names_in
from rankscope.runs.rows import only
from rankscope.runs.run import Run
from rankscope.runs.summary import stacks_of
from rankscope.views import Cell, Column, Section, Table

COLUMN, SCOPE = "theorem", "scope"
SLACK = "log10_slack"
LINES = {"log10_bound": "upper bound", "log10_measured": "measured", "log10_lower_bound": "lower bound"}


@section("bound", "theorems")
def theorems_section(run: Run) -> Section | None:
    """One row per theorem; then, by block, the bounds and the measured values."""
    if not {COLUMN, SCOPE} <= set(run.table.column_names):
        return rows_section(run) if COLUMN in run.table.column_names else None
    names = own_names(run.table, COLUMN)
    if not names:
        return None
    columns = [
        Column("theorem"),
        Column("applies"),
        Column("slack, decades", term=SLACK),
        Column("hypotheses not met", width="wide"),
        Column("source", width="wide"),
    ]
    table = Table(columns, [_row(run, name) for name in names], "Each theorem on these weights")
    said = [[spoken(name), clipped(sentence, 600)] for name in names if (sentence := _from(run, "sentences", name))]
    parts: list[Chart | Table] = [table, *filter(None, [_chart(run, names)])]
    if said:
        words = Column("in words", width="wide")
        parts.append(Table(["theorem", words], said, "What each comes to", folded=True))
    return Section(
        "What the theorems say",
        "A theorem applies to this model only if all its hypotheses are met; a wide slack means that it says little.",
        tuple(parts),
    )


def _row(run: Run, name: str) -> list[str | Cell]:
    mine = only(run.table, theorem=name)
    applies = _from(run, "applies", name)
    word = Cell("") if applies is None else Cell("yes", ("good",)) if applies else Cell("no", ("faint",))
    failed = "; ".join(str(hypothesis) for hypothesis in _from(run, "failed_hypotheses", name) or ())
    sources = "; ".join(_short(str(cite)) for cite in _from(run, "citations", name) or ()) or "ours"
    return [Cell(clipped(spoken(name), 60)), word, _slack(mine), Cell(clipped(failed, 200)),
            Cell(clipped(sources, 120))]  # fmt: skip


def _slack(rows: pa.Table) -> Cell:
    values = values_of(only(rows, metric=SLACK))
    if not values.size:
        return Cell("")
    low, high = f"{np.min(values):.2f}", f"{np.max(values):.2f}"
    return Cell(low if low == high else f"{low} to {high}", marks=("bad",) if np.min(values) < 0 else ())


def _chart(run: Run, names: Sequence[str]) -> Chart | None:
    views: Views = {}
    for name in names:
        for stack in stacks_of(run.table):
            rows = only(run.table, theorem=name, scope="layer", **({} if stack is None else {"stack": stack}))
            lines = _lines(rows)
            if lines:
                views[name, str(stack or "")] = line_view("log10_measured", lines, form="power")
    if not views:
        return None
    caption = "What was measured, and the bounds the theorem puts around it; mean over sequences, band 10% to 90%."
    return Chart("lines", "Between the bounds", caption, ("theorem", "stack"), views)


def _lines(rows: pa.Table) -> list[tuple[str, Curve]]:
    lines = []
    for metric, words in LINES.items():
        here = only(rows, metric=metric)
        for site in names_in(here, "site")[:1]:
            line = curve(here, metric, site)
            if np.isfinite(line.mean).any():
                lines.append((words, line))
    return lines


def _from(run: Run, name: str, theorem: str) -> Any:
    stored = run.extra.get(name)
    return stored.get(theorem) if isinstance(stored, Mapping) else None


def _short(cite: str) -> str:
    """Authors, year and place of a citation."""
    key, _, place = cite.partition(", ")
    who = source_words(key).partition("). ")[0] + ")" if source_words(key) != key else key
    return f"{who}, {place}" if place else who
