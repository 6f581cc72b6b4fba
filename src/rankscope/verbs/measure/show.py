"""How a ``measure`` run is shown, and any run whose verb declares nothing else: metrics by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rankscope.runs.curves import Curve, curve, names_in
from rankscope.runs.document import facts_line, run_document
from rankscope.runs.rows import BETWEEN_INPUTS, ENTRY, only
from rankscope.runs.summary import (
    HEADLINE,
    Summary,
    headline,
    main_site,
    networks_in,
    shown_lines,
    stacks_of,
    summarise,
)
from rankscope.views import Column, Document, Guide, Line, LineChart, Plot, Row, Table, number, spans_decades
from rankscope.views.figures import floor_words

if TYPE_CHECKING:
    from rankscope.runs.run import Run

MOST_COLUMNS = 3
PANELS = ("relative_residual", "mean_cosine", "effective_rank", "attention_entropy")
FEW_INPUTS = 8
"""Fewer inputs say little about how inputs differ."""
RELATIVE = ("relative_", "residual")
"""Prefixes of the names of metrics that the float floor limits."""


INPUTS_HEADLINE = ("relative_residual", "mean_cosine", "centred_effective_rank", "alpha_req", "uniformity")


def document(run: Run) -> Document:
    """A table of headline metrics by block, for each stack, and one of the inputs compared with each other."""
    grids = summarise(run.table) if run.table.num_rows else []
    outliers = outlier_table(run)
    tables = (*map(grid_table, grids), *inputs_tables(run.table))
    return run_document(run, tables if outliers is None else (*tables, outliers))


def outlier_table(run: Run) -> Table | None:
    """Massive activations: where they are, and after which blocks; None if the run has none."""
    outliers: Sequence[Mapping[str, Any]] = run.extra.get("outliers", ())
    if not outliers:
        return None
    several = any(entry["stack"] for entry in outliers)
    rows = [
        [
            *([str(entry["stack"] or "")] if several else []),
            f"{entry['token']} {entry['text']!r}" if entry["text"] is not None else str(entry["token"]),
            str(entry["channel"]),
            str(entry["born"]),
            "the end" if entry["to_the_end"] else str(entry["last"]),
            f"{number(entry['value'])} after block {entry['block']}",
            number(entry["times"]),
            f"{entry['sequences']} of {entry['of_sequences']}",
        ]
        for entry in outliers
    ]
    heads = ["token", "channel", "born in block", "lasts to block", "largest value", "times the median", "sequences"]
    caption = (
        "Massive activations: entries above 1000 times the median of their sequence; the text of a token is that of "
        "sequence 0"
    )
    return Table(["stack", *heads] if several else heads, rows, caption=caption)


def pooled_sites(table: pa.Table) -> list[str]:
    """The sites at which inputs were compared."""
    return [site for site in names_in(table, "site") if site.startswith(BETWEEN_INPUTS) and not site.endswith(ENTRY)]


def inputs_tables(table: pa.Table) -> list[Table]:
    """For each pooling and stack, the metrics between inputs by block."""
    tables = []
    for site in pooled_sites(table):
        rows = only(table, site=site)
        known = names_in(rows, "metric")
        chosen = [name for name in INPUTS_HEADLINE if name in known] or known[:5]
        # With few inputs some have no value in any block: the power law of a spectrum needs more than two.
        chosen = [name for name in chosen if np.isfinite(only(rows, metric=name)["value"].to_numpy()).any()] or chosen
        for grid in summarise(rows, metrics=chosen, site=site):
            name = f"between inputs ({site.removeprefix(BETWEEN_INPUTS)})"
            tables.append(grid_table(grid, f"{grid.stack}, {name}" if grid.stack else name))
    return tables


def grid_table(grid: Summary, caption: str | None = None) -> Table:
    """The table of one stack."""
    trends = [grid.values[grid.blocks, place].tolist() for place in range(len(grid.metrics))]
    columns = [Column(name, trend=trend, term=name) for name, trend in zip(grid.metrics, trends, strict=True)]
    rows: list[Row] = [
        [grid.labels[line], *(grid.cell(line, place) for place in range(len(columns)))]
        for line in shown_lines(len(grid.labels))
    ]
    return Table(["block", *columns], rows, caption=caption or grid.stack or "")


def plot(run: Run, *, metrics: Sequence[str] | None = None, site: str | None = None) -> Plot:
    """The chosen metrics over depth, one panel each; by default four.

    The line is the mean over sequences (and heads), the band runs from the 10% to the 90% quantile. Values at the float
    floor are hollow, the floor itself is a hatched zone, the same-shape random null a dashed line.

    Args:
        run: what to draw.
        metrics: panels, in order.
        site: site of every panel; by default the main site of each metric.

    Raises:
        UnknownNameError: for a metric or site that the run does not contain.
    """
    if run.table.num_rows:
        summarise(run.table, metrics=metrics, site=site)
    known = sorted(headline(run.table, len(HEADLINE)), key=lambda name: name not in PANELS)
    chosen = list(metrics) if metrics is not None else known[: len(PANELS)]
    panels = [depth_chart(run, metric, site or main_site(run.table, metric)) for metric in chosen]
    if metrics is None and site is None and (run.provenance.sequences or 0) >= FEW_INPUTS:
        compared = only(run.table, metric=chosen[0]) if chosen else run.table
        panels += [depth_chart(run, chosen[0], pooled) for pooled in pooled_sites(compared)]
    panels[1:] = [replace(panel, names="none") for panel in panels[1:]]  # the legend of the first is that of all
    settings = f"{facts_line(run)}. Line: mean over sequences; band: 10% to 90%."
    columns = 2 if len(panels) == len(PANELS) else max(1, min(len(panels), MOST_COLUMNS))
    return Plot(run.verdict.partition("\n")[0], settings, tuple(panels), columns=columns)


def depth_chart(run: Run, metric: str, site: str) -> LineChart:
    """One metric at one site by block, a line per stack."""
    lines = lines_by_stack(run.table, metric, site)
    log = _is_log(lines)
    return LineChart(
        title=metric.replace("_", " "),
        subtitle=site,
        lines=tuple(curve_line(name, line) for name, line in lines),
        guides=guides(run, metric, site),
        log=log,
        y_range=None if log else _y_range(lines),
    )


def _is_log(lines: Sequence[tuple[str, Curve]]) -> bool:
    """Whether the values span decades, and all are positive."""
    values = [float(value) for _, line in lines for value in line.mean]
    return not any(value <= 0 for value in values) and spans_decades(values)


def _y_range(lines: Sequence[tuple[str, Curve]]) -> tuple[float, float] | None:
    """From zero if nothing is negative, up to one if nothing is larger."""
    ends = np.concatenate([part for _, line in lines for part in (line.low, line.high)])
    ends = ends[np.isfinite(ends)]
    if not ends.size or ends.min() < 0:
        return None
    high = float(ends.max())
    return 0.0, 1.05 if high <= 1.05 else 1.12 * high


def lines_by_stack(table: pa.Table, metric: str, site: str) -> list[tuple[str, Curve]]:
    """The curve of each network that has one; a run of one network has one line without a name."""
    mine = only(table, metric=metric)
    lines = [(name, curve(rows, metric, site)) for name, rows in networks_in(mine) if site in names_in(rows, "site")]
    return lines if len(lines) > 1 or stacks_of(table) != [None] else [("", line) for _, line in lines]


def curve_line(name: str, line: Curve) -> Line:
    """A curve with its band and the points at the float floor."""
    return Line(name, line.layers, line.mean, line.low, line.high, line.any_floor)


def null_of(run: Run, site: str) -> Mapping[str, Any]:
    """The random baseline of the metrics at a site, empty if there is none: tokens or inputs of the same shape."""
    if not site.startswith(BETWEEN_INPUTS):
        return run.null or {}
    compared = run.extra.get("between_inputs")
    null = compared.get("null") if isinstance(compared, Mapping) else None
    return null if isinstance(null, Mapping) else {}


def guides(run: Run, metric: str, site: str) -> tuple[Guide, ...]:
    """Values to compare a metric with: that of random tokens (or inputs) of the same shape, and the float floor."""
    guides: list[Guide] = []
    reference: Any = null_of(run, site).get(metric)
    level = reference.get("mean") if isinstance(reference, Mapping) else None
    if isinstance(level, (int, float)) and np.isfinite(level):
        guides.append(Guide(float(level), f"same-shape random {number(float(level))}", "null"))
    return (*guides, *(floor_guides(run) if metric.startswith(RELATIVE) else ()))


def floor_guides(run: Run) -> tuple[Guide, ...]:
    """The float floor of the run, if it has one."""
    relative = run.floor.get("relative")
    if not isinstance(relative, (int, float)) or relative <= 0:
        return ()
    return (Guide(float(relative), floor_words(run.floor.get("dtype"), float(relative)), "floor"),)
