"""The ledger: the effect of each part of each block on the residual, as a waterfall chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rankscope.reporting.page.charts import Chart, Views, plain
from rankscope.reporting.page.safe_text import spoken, visible
from rankscope.reporting.page.sections import section
from rankscope.runs.curves import cells, names_in
from rankscope.runs.rows import of_stack, only
from rankscope.runs.run import Run
from rankscope.runs.summary import stacks_of
from rankscope.views import Cell, Row, Section, Table

STREAM_METRICS = ("relative_residual", "residual", "mu", "effective_rank", "stable_rank")
"""Metrics of the ledger; the first one that was measured is shown first."""

SUMS = ("attention.sum", "cross_attention.sum", "mixer.sum", "mlp.sum", "both.sum")
WORDS = {
    "attention.sum": "attention",
    "cross_attention.sum": "cross-attention",
    "mixer.sum": "mixer",
    "mlp.sum": "MLP",
    "both.sum": "attention and MLP",
    "block.out": "post-norm",
}
NOTHING = 1e-9
"""Smaller changes, in decades, are not a step: the output of a pre-norm block is that of its last add."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step of one block: the part, and log10 of the metric before and after it, per sequence."""

    layer: int
    who: str
    before: NDArray[np.float64]
    after: NDArray[np.float64]


@section("measure", "ledger", order=30)
def ledger_section(run: Run) -> Section | None:
    """Which parts bring tokens together and which separate them; None without a site inside the blocks."""
    views: Views = {}
    tables: list[Table] = []
    stacks = stacks_of(run.table)
    for metric in STREAM_METRICS:
        for stack in stacks:
            steps = ledger_steps(run.table, metric, stack)
            if steps:
                views[metric, str(stack or "")] = _view(metric, steps)
                if metric == next(iter(views))[0]:
                    tables.append(_totals(metric, steps, stack))
    if not views:
        return None
    chart = Chart(
        "waterfall",
        "The ledger",
        "Each step is what one part of a block does to the value, in decades (powers of ten), averaged over sequences: "
        "down brings tokens together, up parts them. A norm between two parts is booked with the part after it.",
        ("metric", "stack"),
        views,
    )
    return Section("Who collapses, who repairs", _sentence(run.table, views), (chart, *tables))


def ledger_steps(table: pa.Table, metric: str, stack: str | None) -> list[Step]:
    """The steps of all blocks in order; empty if no site inside a block was measured."""
    mine = of_stack(only(table, metric=metric), stack)
    sites = names_in(mine, "site")
    inside = [site for site in SUMS if site in sites]
    if not inside:
        return []
    grids = {site: _levels(mine, metric, site) for site in (*inside, "block.in", "block.out") if site in sites}
    steps: list[Step] = []
    for layer in sorted({layer for grid in grids.values() for layer in grid}):
        # Without block.in, the input of a block is the output of the one before.
        before = grids.get("block.in", {}).get(layer)
        if before is None:
            before = grids.get("block.out", {}).get(layer - 1)
        for site in (*inside, "block.out"):
            after = grids.get(site, {}).get(layer)
            if after is None:
                continue
            if before is not None and _moves(site, before, after):
                steps.append(Step(layer, WORDS[site], before, after))
            before = after
    return steps


def _levels(table: pa.Table, metric: str, site: str) -> dict[int, NDArray[np.float64]]:
    grid = cells(table, metric, site)
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.where(grid.values > 0, np.log10(grid.values), np.nan)
    return {int(layer): levels[row] for row, layer in enumerate(grid.layers)}


def _moves(site: str, before: NDArray[np.float64], after: NDArray[np.float64]) -> bool:
    # The last sum of a block usually is its output; a step is shown only if something follows, such as a norm.
    if site != "block.out" or before.shape != after.shape:
        return before.shape == after.shape
    return bool((np.abs(np.nan_to_num(after - before)) > NOTHING).any())


def _view(metric: str, steps: Sequence[Step]) -> dict[str, Any]:
    return {
        "metric": metric,
        "steps": [
            {
                "block": step.layer,
                "who": step.who,
                "from": plain(_mean(step.before)),
                "to": plain(_mean(step.after)),
                "low": plain(_quantile(step.after - step.before, 0.1)),
                "high": plain(_quantile(step.after - step.before, 0.9)),
            }
            for step in steps
        ],
    }


def _totals(metric: str, steps: Sequence[Step], stack: str | None) -> Table:
    """Change in decades over all blocks, by part."""
    rows: list[Row] = []
    for who in dict.fromkeys(step.who for step in steps):
        moves = [_mean(step.after - step.before) for step in steps if step.who == who]
        known = [move for move in moves if np.isfinite(move)]
        down, up = sum(move for move in known if move < 0), sum(move for move in known if move > 0)
        rows.append([who, str(len(moves)), Cell(f"{down:+.3f}", ("bad",)), Cell(f"{up:+.3f}", ("good",)),
                     f"{down + up:+.3f}"])  # fmt: skip
    name = f", {visible(stack)}" if stack else ""
    caption = f"The whole depth{name}: decades of {spoken(metric)} taken away and given back"
    return Table(["part", "steps", "down", "up", "in all"], rows, caption)


def _sentence(table: pa.Table, views: Mapping[tuple[str, ...], object]) -> str:
    metric, stack = next(iter(views))
    steps = ledger_steps(table, metric, stack or None)
    totals = {
        who: float(np.nansum([_mean(step.after - step.before) for step in steps if step.who == who]))
        for who in dict.fromkeys(step.who for step in steps)
    }
    down, up = min(totals, key=lambda who: totals[who]), max(totals, key=lambda who: totals[who])
    parts = []
    if totals[down] < 0:
        parts.append(f"{down} takes away most ({totals[down]:+.3f} decades of {spoken(metric)} over all blocks)")
    if totals[up] > 0:
        parts.append(f"{up} gives back most ({totals[up]:+.3f})")
    words = "; ".join(parts) or "no part moves it"
    return f"{words[:1].upper()}{words[1:]}."


def _mean(values: NDArray[np.float64]) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _quantile(values: NDArray[np.float64], share: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.quantile(known, share)) if known.size else float("nan")
