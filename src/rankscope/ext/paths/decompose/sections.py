"""Sections of a decomposition: the share of each path length, and the paths through each head and block."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc

from rankscope.ext.paths.decompose.judge import by_length, columns_shown
from rankscope.reporting.page.charts import Chart, Views, head_grid, heat_view, line_view, plain_list
from rankscope.reporting.page.sections import section
from rankscope.runs.curves import curve, names_in
from rankscope.runs.rows import only
from rankscope.runs.run import Run
from rankscope.runs.summary import stacks_of
from rankscope.views import Section

THROUGH_HEADS, THROUGH_LAYERS, OF_A_LENGTH = "through a head", "through a layer", "of a length"


@section("decompose", "paths")
def paths_section(run: Run) -> Section | None:
    """Bars by path length, a heatmap of marginals by head, and a line of marginals by block."""
    if not {"paths", "length", "origin"} <= set(run.table.column_names):
        return None
    parts = [chart for chart in (_lengths(run), _heads(run), _layers(run)) if chart is not None]
    if not parts:
        return None
    lead = "The output as a sum over paths through the blocks: a path of length k goes through k attention heads."
    return Section("Which paths carry the signal", lead, tuple(parts))


def _lengths(run: Run) -> Chart | None:
    views: Views = {}
    counts = run.extra.get("path_counts", {})
    for metric in columns_shown(run.table):
        for stack in stacks_of(run.table):
            for label, layer in _ends(run, stack):
                line = by_length(run.table, metric, stack, layer=layer)
                if line.lengths.size:
                    views[metric, f"{stack or ''} {label}".strip()] = {
                        "metric": metric,
                        "xlabel": "path length",
                        "x": [int(length) for length in line.lengths],
                        "y": plain_list(line.mean),
                        "low": plain_list(line.low),
                        "high": plain_list(line.high),
                        "counts": [str(count) for count in counts.get(str(stack or ""), ())] if layer is None else [],
                    }
    if not views:
        return None
    caption = "Mean over sequences of all paths of one length together; whiskers run from the 10% to the 90% quantile."
    return Chart("bars", "Path lengths", caption, ("metric", "measured at"), views)


def _ends(run: Run, stack: str | None) -> list[tuple[str, int | None]]:
    rows = only(run.table, paths=OF_A_LENGTH, stack=stack, site="block.out")
    layers = sorted(int(layer) for layer in pc.unique(rows["layer"]).to_pylist())
    at_end: list[tuple[str, int | None]] = [("the end", None)]
    return at_end + [(f"block {layer}", layer) for layer in layers] if len(layers) > 1 else at_end


def _heads(run: Run) -> Chart | None:
    views: Views = {}
    for stack in stacks_of(run.table):
        rows = only(run.table, paths=THROUGH_HEADS, stack=stack)
        for metric in names_in(rows, "metric"):
            here = only(rows, metric=metric)
            here = here.filter(pc.is_valid(here["head"]))
            if here.num_rows:
                views[metric, str(stack or "")] = heat_view(metric, *head_grid(here))
    if not views:
        return None
    caption = "All paths through a head together, averaged over sequences; blocks to the right, heads downwards."
    return Chart("heat", "Paths through each head", caption, ("metric", "stack"), views)


def _layers(run: Run) -> Chart | None:
    views: Views = {}
    for stack in stacks_of(run.table):
        rows = only(run.table, paths=THROUGH_LAYERS, stack=stack)
        for metric in names_in(rows, "metric"):
            here = only(rows, metric=metric)
            for site in names_in(here, "site"):
                line = curve(here, metric, site)
                if np.isfinite(line.mean).any():
                    views[metric, str(stack or "")] = line_view(metric, [("", line)])
    if not views:
        return None
    caption = "All paths that go through the attention of a block together, mean and 10% to 90% over sequences."
    return Chart("lines", "Paths through each block", caption, ("metric", "stack"), views)
