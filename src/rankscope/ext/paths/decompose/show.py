"""How a ``decompose`` run is shown: a table by path length, and the heads with the largest shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.ext.paths.decompose.judge import SHARE, by_length, columns_shown, through_heads
from rankscope.runs.document import facts_line, run_document
from rankscope.runs.summary import stacks_of
from rankscope.views import UNDEFINED, Column, Document, Line, LineChart, Plot, Row, Style, Table, measured
from rankscope.views.palette import SERIES

if TYPE_CHECKING:
    from rankscope.runs.run import Run

MOST_HEADS = 8
HEADS_CAPTION = "all paths through a head, the largest shares"


def document(run: Run) -> Document:
    """A table of lengths for each stack, and the heads whose paths carry most."""
    parts: list[Table] = []
    for stack in stacks_of(run.table):
        parts.append(_lengths(run, stack))
        if (heads := _heads(run, stack)) is not None:
            parts.append(heads)
    return run_document(run, tuple(parts))


def _lengths(run: Run, stack: str | None) -> Table:
    curves = {metric: by_length(run.table, metric, stack) for metric in columns_shown(run.table)}
    counts = run.extra.get("path_counts", {}).get(str(stack or ""), ())
    rows: list[Row] = []
    for length in curves[SHARE].lengths:
        positions = [np.flatnonzero(line.lengths == length) for line in curves.values()]
        cells = [
            measured(float(line.mean[place[0]])) if place.size else UNDEFINED
            for line, place in zip(curves.values(), positions, strict=True)
        ]
        rows.append([str(length), _path_count(counts, int(length)), *cells])
    columns = [Column(metric, trend=line.mean.tolist(), term=metric) for metric, line in curves.items()]
    return Table(["length", "paths", *columns], rows, caption=stack or "")


def _path_count(counts: tuple[str, ...], length: int) -> str:
    """How many paths have this length, in three digits; empty if that is not known."""
    return f"{float(counts[length]):.3g}" if length < len(counts) else ""


def _heads(run: Run, stack: str | None) -> Table | None:
    """The heads whose paths carry the largest shares; None if they were not computed."""
    share = through_heads(run.table, SHARE, stack)
    residual = through_heads(run.table, "relative_residual", stack)
    if not share.size:
        return None
    rows: list[Row] = []
    for flat in np.argsort(-np.nan_to_num(share), axis=None)[:MOST_HEADS]:
        layer, head = np.unravel_index(flat, share.shape)
        apart = measured(float(residual[layer, head])) if residual.size else ""
        rows.append([f"{layer}.{head}", measured(float(share[layer, head])), apart])
    return Table(["head", SHARE, "relative_residual"], rows, caption=HEADS_CAPTION)


def plot(run: Run) -> Plot:
    """Share of the output and relative residual by length: a bar per stack, with the band over sequences."""
    shares: list[Line] = []
    residuals: list[Line] = []
    for number, stack in enumerate(stacks_of(run.table)):
        style, label = Style(SERIES[number % 4], "o"), stack or ""
        for lines, metric in ((shares, SHARE), (residuals, "relative_residual")):
            line = by_length(run.table, metric, stack)
            lines.append(Line(label, line.lengths, line.mean, line.low, line.high, style=style))
    charts = {"share of the output": shares, "relative residual": residuals}
    panels = tuple(
        LineChart(
            title,
            tuple(lines),
            x_label="length of the paths",
            names="legend" if lines is shares else "none",
            empty="nothing by length",
            bars=True,
        )
        for title, lines in charts.items()
    )
    return Plot(run.verdict, facts_line(run), panels, columns=2, panel_size=(4.7, 2.9))
