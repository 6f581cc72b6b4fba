"""The battery over depth: one chart with a switch, and the same numbers as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rankscope.reporting.page.lines import guides_for, line_view, lines_by_stack
from rankscope.reporting.page.parts import Cell, Chart, Choice, Section, Table
from rankscope.reporting.page.wording import clipped, spoken, visible
from rankscope.runs.curves import names_in
from rankscope.runs.rows import only
from rankscope.runs.run import Run
from rankscope.runs.summary import HEADLINE, MAIN_SITES, Summary, shown_lines, stacks_of, summarise
from rankscope.runs.text import cell, floor_line

MOST_COLUMNS = 9


def depth_section(run: Run, detail: int) -> Section | None:
    """Every metric at every site by block; with little ``detail``, at its main site only."""
    views: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for metric in metrics_in_order(run.table):
        sites = sites_in_order(run.table, metric)
        for site in sites if detail > 0 else sites[:1]:
            lines = lines_by_stack(run.table, metric, site)
            guides = guides_for(run, metric, stream=not site.endswith(".probs"))
            if lines:
                views[metric, site] = line_view(metric, lines, guides)
    if not views:
        return None
    chart = Chart(
        "lines",
        "Over depth",
        "The line is the mean over sequences (and heads), the band runs from the 10% to the 90% quantile. Hollow "
        "points lie at the float floor.",
        metric_and_site(views),
        views,
        cards=True,
    )
    tables = [_table(run, grid, last=position == 0) for position, grid in enumerate(summarise(run.table, limit=9))]
    lead = "Each value by block. Pick a metric on its card or in the list."
    return Section("Layer by layer", lead, (chart, *tables))


def metrics_in_order(table: pa.Table) -> list[str]:
    """Names of the metrics, those worth a headline first."""
    known = names_in(table, "metric")
    return [name for name in HEADLINE if name in known] + [name for name in known if name not in HEADLINE]


def sites_in_order(table: pa.Table, metric: str) -> list[str]:
    """Sites of a metric, its main one first."""
    sites = names_in(only(table, metric=metric), "site")
    return sorted(sites, key=lambda site: (MAIN_SITES.index(site) if site in MAIN_SITES else len(MAIN_SITES), site))


def metric_and_site(keys: Mapping[tuple[str, ...], object]) -> tuple[Choice, ...]:
    """The two switches for views with keys ``(metric, site)``."""
    return (
        Choice("metric", options(key[0] for key in keys)),
        Choice("site", tuple((site, visible(site)) for site, _ in options(key[1] for key in keys))),
    )


def options(values: Any) -> tuple[tuple[str, str], ...]:
    """Each value once, with the words shown for it."""
    return tuple((value, clipped(spoken(value), 60)) for value in dict.fromkeys(values))


def _table(run: Run, grid: Summary, *, last: bool) -> Table:
    head: list[str | Cell] = ["block", *(Cell(spoken(name), term=name) for name in grid.metrics)]
    rows: list[Sequence[str | Cell]] = []
    for line in shown_lines(len(grid.labels)):
        if line is None:
            rows.append(["…"] * len(head))
            continue
        marks = ["floor" if at_floor else "" for at_floor in grid.floor[line]]
        words = [cell(grid, line, column) for column in range(len(grid.metrics))]
        rows.append([grid.labels[line], *(Cell(text, mark=mark) for text, mark in zip(words, marks, strict=True))])
    several = len(stacks_of(run.table)) > 1
    caption = f"Numbers by block{f', {visible(grid.stack)}' if several and grid.stack else ''}"
    floor = f". {floor_line(run)}" if grid.floor.any() and last else ""
    return Table(caption + floor, head, rows, folded=True)
