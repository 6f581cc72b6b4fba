"""Tables and figures of a comparison: one row per block, one column per metric, each difference with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rankscope.errors import UnknownNameError
from rankscope.runs.curves import names_in
from rankscope.runs.rows import BETWEEN_INPUTS, ENTRY, only, within_sequences
from rankscope.runs.showing import VIEWS, Show
from rankscope.runs.summary import headline, main_site, shown_lines
from rankscope.views import Cell, Column, Document, Guide, Line, LineChart, Plot, Table, number

if TYPE_CHECKING:
    from rankscope.runs.comparison import Comparison

MOST_METRICS = 5
MOST_COLUMNS, MOST_PANELS, MOST_LINES = 3, 6, 5
APART = "* the interval excludes zero"


def document(comparison: Comparison) -> Document:
    """Differences and intervals of the headline metrics, by block."""
    level = f"{comparison.settings['level']:.0%}"
    how = "paired" if comparison.paired else "not paired"
    chosen = headline(comparison.table, MOST_METRICS)
    within = within_sequences(comparison.table)
    tables = [difference_table(rows, chosen, name) for name, rows in difference_groups(within)]
    for site in names_in(comparison.table, "site"):
        if site.startswith(BETWEEN_INPUTS) and not site.endswith(ENTRY):
            groups = difference_groups(only(comparison.table, site=site))
            tables += [difference_table(rows, chosen, name) for name, rows in groups]
    return Document(
        title=f"a: {comparison.a}\nb: {comparison.b}",
        verdict=comparison.verdict,
        parts=(
            f"b - a with {level} intervals over sequences, {how} ({comparison.settings['why']})",
            *(table for table in tables if table.rows),
        ),
        legend={"apart": APART},
    )


def difference_groups(table: pa.Table) -> list[tuple[str, pa.Table]]:
    """Rows of each stack and each combination of the verb's additional columns, with a name."""
    own = ["stack", *table.column_names[4 : table.column_names.index("a")]]
    keys = dict.fromkeys(zip(*(table[name].to_pylist() for name in own), strict=True))
    return [
        (
            ", ".join(str(value) for value in key if value is not None),
            only(table, **dict(zip(own, key, strict=True))),
        )
        for key in keys
    ]


def difference_table(table: pa.Table, metrics: Sequence[str], caption: str) -> Table:
    """One row per block: for each metric at its main site, the difference and its interval."""
    columns: list[Column] = []
    columns_of_cells: list[dict[int, Cell]] = []
    for metric in metrics:
        rows = only(table, metric=metric)
        if rows.num_rows:
            site = main_site(rows, metric)
            columns.append(Column(f"{metric} at {site}", term=metric))
            columns_of_cells.append({int(row["layer"]): _difference(row) for row in only(rows, site=site).to_pylist()})
    layers = sorted({layer for column in columns_of_cells for layer in column})
    rows = [
        [str(layers[place]), *(column.get(layers[place], Cell("")) for column in columns_of_cells)]
        for place in shown_lines(len(layers))
    ]
    return Table(["block", *columns], rows, caption=caption)


def _difference(row: dict[str, Any]) -> Cell:
    difference = number(float(row["difference"]))
    if not (np.isfinite(row["low"]) and np.isfinite(row["high"])):
        return Cell(difference)
    apart = row["low"] > 0 or row["high"] < 0
    interval = f"[{number(float(row['low']))}, {number(float(row['high']))}]"
    return Cell(difference, ("apart",) if apart else (), detail=interval)


def plot(comparison: Comparison, *, metrics: Sequence[str] | None = None, site: str | None = None) -> Plot:
    """One panel per metric; the line is the difference, the band its interval.

    Raises:
        UnknownNameError: for a metric or a site that was not compared.
    """
    known = names_in(comparison.table, "metric")
    for name in metrics or ():
        if name not in known:
            raise UnknownNameError("metric in this comparison", name, known)
    if site is not None and site not in (sites := names_in(comparison.table, "site")):
        raise UnknownNameError("site in this comparison", site, sites)
    chosen = list(metrics) if metrics is not None else headline(comparison.table, MOST_PANELS)
    settings = f"b − a with {comparison.settings['level']:.0%} intervals over sequences"
    panels = tuple(_chart(comparison.table, metric, site or main_site(comparison.table, metric)) for metric in chosen)
    return Plot(comparison.verdict, settings, panels, columns=max(1, min(len(chosen), MOST_COLUMNS)))


def _chart(table: pa.Table, metric: str, site: str) -> LineChart:
    groups = difference_groups(only(table, metric=metric, site=site))[:MOST_LINES]
    lines = tuple(
        Line(name, *(rows[column].to_numpy() for column in ("layer", "difference", "low", "high")))
        for name, rows in groups
    )
    return LineChart(metric.replace("_", " "), lines, subtitle=site, guides=(Guide(0.0, ""),))


def _show() -> Show:
    return Show(document=document, plot=plot, has_choices=True)


VIEWS.add("compare", _show)
