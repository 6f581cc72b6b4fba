"""Default section for verbs without their own charts: lines over depth, or a table if there is no depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope.reporting.page.charts import (
    MOST_SERIES,
    Chart,
    Views,
    line_view,
    metrics_in_order,
    sites_in_order,
)
from rankscope.reporting.page.safe_text import clipped, spoken, visible
from rankscope.runs.curves import Curve, curve
from rankscope.runs.rows import only
from rankscope.runs.run import Run
from rankscope.runs.summary import networks_in
from rankscope.views import UNDEFINED, Cell, Section, Table, number

MOST_ROWS = 120


def rows_section(run: Run) -> Section | None:
    """Every metric by block, one line per combination of the verb's additional columns."""
    views: Views = {}
    lines: list[tuple[str, str, str, Curve]] = []
    for metric in metrics_in_order(run.table):
        for site in sites_in_order(run.table, metric):
            lines_shown = list(_lines(only(run.table, metric=metric, site=site), metric, site))
            lines += [(metric, site, name, line) for name, line in lines_shown]
            if any(line.layers.size > 1 for _, line in lines_shown):
                form = "power" if metric.startswith("log10_") else "number"
                views[metric, site] = line_view(metric, lines_shown, form=form)
    if not lines:
        return None
    parts: list[Chart | Table] = []
    if views:
        caption = "Mean over sequences with the band from the 10% to the 90% quantile."
        most = max(len(view["series"]) for view in views.values())
        if most == MOST_SERIES:
            caption += f" At most {MOST_SERIES} lines are drawn; the table has the others."
        parts.append(Chart("lines", "By block", caption, ("metric", "site"), views))
    parts.append(_table(lines, folded=bool(views)))
    return Section("What was computed", "", tuple(parts))


def _lines(table: pa.Table, metric: str, site: str) -> Iterator[tuple[str, Curve]]:
    for name, rows in networks_in(table):
        if rows.num_rows:
            yield name, curve(rows, metric, site)


def _table(lines: Sequence[tuple[str, str, str, Curve]], *, folded: bool) -> Table:
    rows = [_row(*line) for line in lines[:MOST_ROWS]]
    head = ["metric", "site", "of", "blocks", "first", "last", "least", "largest"]
    return Table(head, rows, "Numbers", folded=folded, left_out=max(0, len(lines) - MOST_ROWS))


def _row(metric: str, site: str, name: str, line: Curve) -> list[str | Cell]:
    known = line.mean[np.isfinite(line.mean)]
    ends = [number(float(line.mean[0])), number(float(line.mean[-1]))]
    extremes = [number(float(known.min())), number(float(known.max()))] if known.size else [UNDEFINED] * 2
    return [
        Cell(spoken(metric), term=metric),
        visible(site),
        clipped(name, 60),
        str(line.layers.size),
        *ends,
        *extremes,
    ]


def values_of(rows: pa.Table) -> NDArray[np.float64]:
    """Finite values of some rows."""
    values: NDArray[np.float64] = rows["value"].to_numpy()
    finite: NDArray[np.float64] = values[np.isfinite(values)]
    return finite


def own_names(table: pa.Table, column: str) -> list[str]:
    """Names in one of the verb's additional columns, in order."""
    return [str(name) for name in pc.unique(table[column]).to_pylist() if name is not None]
