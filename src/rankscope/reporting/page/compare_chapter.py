"""The chapter of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rankscope.reporting.page.charts import (
    MOST_SERIES,
    Chart,
    Views,
    metrics_in_order,
    plain_list,
    sites_in_order,
)
from rankscope.reporting.page.rendering import Chapter
from rankscope.reporting.page.safe_text import clipped, paragraphs, split_verdict, visible
from rankscope.runs.compare_show import difference_groups, difference_table
from rankscope.runs.comparison import Comparison
from rankscope.runs.rows import only
from rankscope.runs.summary import headline
from rankscope.views import Section

MOST_METRICS = 5


def comparison_chapter(comparison: Comparison, together: Sequence[Section]) -> Chapter:
    """Differences over depth with their intervals, as charts and tables, then the sections ``together``."""
    title, rest = split_verdict(visible(comparison.verdict))
    level = f"{comparison.settings['level']:.0%}"
    tiles = [
        ("sequences", "paired" if comparison.paired else "not paired"),
        ("intervals", f"{level}, {'Student' if comparison.paired else 'Welch'}"),
    ]
    chart = _chart(comparison.table, level)
    chosen = headline(comparison.table, MOST_METRICS)
    tables = [
        difference_table(
            rows, chosen, f"Difference and interval by block{f', {clipped(name, 60)}' if name else ''}; * excludes zero"
        )
        for name, rows in difference_groups(comparison.table)[:MOST_SERIES]
    ]
    lead = f"Pairing: {visible(comparison.settings['why'])}."
    return Chapter(
        title="compare · b − a",
        question="How do the two runs differ?",
        state="plain",
        headline=title,
        verdict=paragraphs(rest),
        tiles=tiles,
        sections=(
            Section("The differences", lead, (chart, *(table for table in tables if table.rows))),
            *together,
        ),
        notes=[f"a: {clipped(comparison.a, 200)}", f"b: {clipped(comparison.b, 200)}"],
    )


def _chart(table: pa.Table, level: str) -> Chart:
    views: Views = {}
    for metric in metrics_in_order(table):
        for site in sites_in_order(table, metric):
            here = only(table, metric=metric, site=site)
            views[metric, site] = {
                "metric": metric,
                "series": [_series(name, rows) for name, rows in difference_groups(here)[:MOST_SERIES]],
                "guides": [{"kind": "level", "value": 0, "label": "no difference"}],
                "log": False,
                "form": "number",
                "band": ["low", "high"],
            }
    caption = f"The line is the difference b − a of the means, the band its {level} interval over sequences."
    return Chart("lines", "b − a over depth", caption, ("metric", "site"), views, cards=True)


def _series(name: str, rows: pa.Table) -> dict[str, Any]:
    numbers = {key: plain_list(rows[column].to_numpy()) for key, column in
               (("y", "difference"), ("low", "low"), ("high", "high"))}  # fmt: skip
    return {"name": clipped(name, 40), "x": rows["layer"].to_pylist(), "floor": [], **numbers}
