"""Sections of a ``measure`` run: metrics over depth, heatmaps by head, and cosines between tokens."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope.reporting.page.charts import (
    Chart,
    Views,
    guides_of,
    head_grid,
    heat_view,
    line_view,
    metrics_in_order,
    sites_in_order,
)
from rankscope.reporting.page.safe_text import clipped, visible
from rankscope.reporting.page.sections import section
from rankscope.runs.curves import names_in
from rankscope.runs.document import floor_line
from rankscope.runs.rows import of_stack, only
from rankscope.runs.run import Run
from rankscope.runs.similarity import Similarity, shown_positions, similarities_in
from rankscope.runs.summary import Summary, stacks_of, summarise
from rankscope.verbs.measure.show import grid_table, inputs_tables, lines_by_stack, outlier_table
from rankscope.views import Section, Table

MOST_COLUMNS = 9


@section("measure", "depth", order=10)
def depth_section(run: Run) -> Section | None:
    """Every metric at every site by block."""
    views: Views = {}
    for metric in metrics_in_order(run.table):
        for site in sites_in_order(run.table, metric):
            lines = lines_by_stack(run.table, metric, site)
            guides = guides_of(run, metric, site)
            if lines:
                views[metric, site] = line_view(metric, lines, guides)
    if not views:
        return None
    chart = Chart(
        "lines",
        "Over depth",
        "The line is the mean over sequences (and heads), the band runs from the 10% to the 90% quantile. Hollow "
        "points lie at the float floor.",
        ("metric", "site"),
        views,
        cards=True,
    )
    tables = [_numbers(run, grid, first=position == 0) for position, grid in enumerate(summarise(run.table, limit=9))]
    tables += [replace(table, folded=True) for table in inputs_tables(run.table)]
    lead = "Each value by block. Pick a metric on its card or in the list."
    return Section("Layer by layer", lead, (chart, *tables))


def _numbers(run: Run, grid: Summary, *, first: bool) -> Table:
    """The table of one stack; the first table also states the float floor."""
    several = len(stacks_of(run.table)) > 1
    caption = f"Numbers by block{f', {visible(grid.stack)}' if several and grid.stack else ''}"
    floor = f". {floor_line(run)}" if grid.floor.any() and first else ""
    return replace(grid_table(grid), caption=caption + floor, folded=True)


HEADS_FIRST = ("attention_entropy", "first_token_sink_rate", "attention_rank_one_distance", "attention_contraction")


@section("measure", "heads", order=40)
def heads_section(run: Run) -> Section | None:
    """A heatmap of each metric that has a value per head."""
    table = run.table.filter(pc.is_valid(run.table["head"]))
    views: Views = {}
    known = names_in(table, "metric")
    for metric in sorted(
        known, key=lambda name: (HEADS_FIRST.index(name) if name in HEADS_FIRST else len(HEADS_FIRST), name)
    ):
        rows = only(table, metric=metric)
        for site, stack in _places(rows):
            here = of_stack(only(rows, site=site), stack)
            views[metric, _place_name(site, stack)] = heat_view(metric, *head_grid(here))
    if not views:
        return None
    chart = Chart(
        "heat",
        "Heads by block",
        "One tile per head, averaged over sequences; blocks to the right, heads downwards.",
        ("metric", "place"),
        views,
    )
    return Section("Head by head", "Where attention is spread, has sinks, or is uniform.", (chart,))


def _places(rows: pa.Table) -> list[tuple[str, str | None]]:
    sites, stacks = rows["site"].to_pylist(), rows["stack"].to_pylist()
    return list(dict.fromkeys(zip(sites, stacks, strict=True)))


def _place_name(site: str, stack: str | None) -> str:
    return f"{stack} {site}" if stack else site


@section("measure", "outliers", order=50)
def outliers_section(run: Run) -> Section | None:
    """The massive activations of a run; None if there are none."""
    table = outlier_table(run)
    if table is None:
        return None
    lead = (
        "Single entries of the stream that dwarf all others. They dominate norms, ranks and residuals of their block."
    )
    return Section("Massive activations", lead, (table,))


MOST_BLOCKS = 64
LONGEST_TOKEN = 24


@section("measure", "similarity", order=60)
def similarity_section(run: Run) -> Section | None:
    """The similarity matrices stored in a run; None if there are none."""
    stacks = similarities_in(run.extra)
    if not stacks:
        return None
    views: Views = {}
    for name, similarity in stacks.items():
        for position in shown_positions(len(similarity.blocks), MOST_BLOCKS):
            views[name, str(similarity.blocks[position])] = _matrix_view(similarity, position)
    first = next(iter(stacks.values()))
    shown = len(first.positions)
    some = f"{shown} evenly spaced tokens of {first.tokens}" if shown < first.tokens else f"all {shown} tokens"
    chart = Chart(
        "matrix",
        "Tokens against tokens",
        f"Cosine between {some} of sequence {first.sequence}, after each block. When all turn one colour, the tokens "
        "point one way.",
        ("stack", "block"),
        views,
        slider="block",
    )
    return Section("How alike the tokens are", "Move the slider through the blocks.", (chart,))


def _matrix_view(found: Similarity, position: int) -> dict[str, Any]:
    cosines = found.matrices[position]
    known = np.isfinite(cosines)
    levels = np.where(known, np.rint(np.nan_to_num(cosines) * 127), -128).astype(np.int8)
    size = len(found.positions)
    pairs = cosines[~np.eye(size, dtype=bool)]
    pairs = pairs[np.isfinite(pairs)]
    return {
        "metric": "mean_cosine",
        "size": size,
        "data": base64.b64encode(levels.tobytes()).decode("ascii"),
        "positions": list(found.positions),
        "labels": [clipped(label, LONGEST_TOKEN) for label in found.labels],
        "mean": round(float(pairs.mean()), 4) if pairs.size else None,
    }
