"""How a ``bound`` run is shown: one section per theorem, and the measured contraction between its bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.ext.theory.bound.judge import OURS, PUBLISHED, TheoremGrid, grid_of, rows_of, theorems_in
from rankscope.runs.document import facts_line, run_document
from rankscope.runs.summary import shown_lines, stacks_of
from rankscope.views import (
    UNDEFINED,
    Cell,
    Column,
    Document,
    Guide,
    Line,
    LineChart,
    Part,
    Plot,
    Row,
    Section,
    Style,
    Table,
)
from rankscope.views.palette import BLUE, VERMILION

if TYPE_CHECKING:
    from rankscope.runs.run import Run

HEADINGS = {
    "log10_factor": "log10 factor",
    "log10_lower_bound": "log10 lower",
    "log10_measured": "log10 measured",
    "log10_bound": "log10 upper",
    "log10_slack": "log10 slack",
}
MEANING = "log10, mean over sequences; margin: of the hypothesis nearest to failing or failing most, below 0 fails."


MOST_WHOLE = 2
"""A run of more theorems than this shows one row per theorem, so that it fits a screen."""


def document(run: Run) -> Document:
    """Of one or two theorems the sentence, layers, depth and hypotheses that fail; of more, one row each."""
    cases = [(theorem, stack) for theorem in theorems_in(run.table) for stack in stacks_of(run.table)]
    if len(theorems_in(run.table)) > MOST_WHOLE:
        return run_document(run, (_overview(run, cases), OVERVIEW))
    return run_document(run, (*(_theorem(run, theorem, stack) for theorem, stack in cases), MEANING))


OVERVIEW = (
    "applies: whether every hypothesis is met; slack: log10 of bound over measured value, least to largest over "
    "blocks. --theorems NAME shows the blocks of a theorem and the hypotheses that fail."
)


def _overview(run: Run, cases: list[tuple[str, str | None]]) -> Table:
    rows: list[Row] = []
    for theorem, stack in cases:
        applies = run.extra.get("applies", {}).get(theorem)
        rows.append(
            [
                f"{theorem}, {stack}" if stack else theorem,
                "" if applies is None else "yes" if applies else "no",
                _slack(run, theorem, stack),
                run.extra["quantities"][theorem],
            ]
        )
    quantity = Column("quantity bounded", align="left", width="wide")
    return Table([Column("theorem", align="left"), "applies", "slack", quantity], rows)


def _slack(run: Run, theorem: str, stack: str | None) -> str:
    """The least and the largest mean slack of a block, or that over depth; empty if nothing was measured."""
    for scope in ("layer", "depth"):
        grid = grid_of(run.table, theorem, scope, stack)
        slack = grid.mean("log10_slack") if _any(grid, "log10_slack") else np.empty(0)
        slack = slack[~np.isnan(slack)]
        if slack.size:
            ends = dict.fromkeys(f"{end:.2f}" for end in (slack.min(), slack.max()))
            return " to ".join(ends)
    return ""


def _theorem(run: Run, theorem: str, stack: str | None) -> Section:
    cites = ", ".join(run.extra.get("citations", {}).get(theorem, ())) or "ours"
    title = f"{theorem} ({cites}){f', {stack}' if stack else ''}: {run.extra['quantities'][theorem]}"
    parts: list[Part] = []
    grid = grid_of(run.table, theorem, "layer", stack)
    if grid.layers.size:
        parts.append(_table(grid))
    depth = grid_of(run.table, theorem, "depth", stack)
    if depth.layers.size:
        words = [f"{HEADINGS[name]} {_number(depth.mean(name)[0])}" for name in HEADINGS if _any(depth, name)]
        parts.append("whole depth: " + ", ".join(words))
    failing = _failing(run, theorem, stack)
    if failing:
        parts.append("not met: " + "; ".join(failing))
    return Section(title, run.extra["sentences"][theorem], tuple(parts))


def _table(grid: TheoremGrid) -> Table:
    metrics = [name for name in HEADINGS if _any(grid, name)]
    means = {name: grid.mean(name) for name in metrics}
    margins = bool(np.isfinite(grid.least_margin).any())
    rows: list[Row] = []
    for place in shown_lines(grid.layers.size):
        floor = bool(grid.floor[place].any())
        cells = [
            Cell(_number(means[name][place]), ("floor",) if floor and name == "log10_measured" else ())
            for name in metrics
        ]
        rows.append([str(grid.layers[place]), *cells, *([_number(grid.least_margin[place])] if margins else [])])
    return Table(["block", *(HEADINGS[name] for name in metrics), *(["margin"] if margins else [])], rows)


def _failing(run: Run, theorem: str, stack: str | None) -> list[str]:
    """Each hypothesis that fails somewhere, with its worst margin."""
    worst: dict[str, float] = {}
    for scope in ("network", "layer", "depth"):
        rows = rows_of(run.table, theorem, scope, stack)
        for metric, value, hypothesis in zip(
            rows["metric"].to_pylist(), rows["value"].to_pylist(), rows["hypothesis"].to_pylist(), strict=True
        ):
            if metric == "margin" and not value >= 0:
                worst[hypothesis] = min(worst.get(hypothesis, np.inf), value)
    return [f"{name} (margin {_number(value)})" for name, value in worst.items()]


def _any(grid: TheoremGrid, name: str) -> bool:
    return bool((~np.isnan(grid.values[name])).any())


def _number(value: float) -> str:
    if np.isnan(value):
        return UNDEFINED
    if np.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:.3g}" if abs(value) >= 1000 or (value and abs(value) < 0.01) else f"{value:.2f}"


def plot(run: Run) -> Plot:
    """Left: the contraction of each layer inside its interval. Right: how far each upper bound lies above."""
    stack = stacks_of(run.table)[0]
    panels = (_interval(run, stack), _slacks(run, stack))
    return Plot(run.verdict, facts_line(run), panels, columns=2, panel_size=(4.8, 3.3))


def _interval(run: Run, stack: str | None) -> LineChart:
    title = "residual after attention over before, log10"
    grid = grid_of(run.table, OURS, "layer", stack)
    if not grid.layers.size:
        return LineChart(title, (), empty="not evaluated")
    rounding = grid.floor.all(axis=1)
    lower, upper = grid.mean("log10_lower_bound"), np.where(rounding, np.nan, grid.mean("log10_bound"))
    lower = np.where(np.isfinite(lower) & np.isfinite(upper), lower, np.nan)
    edge = Style(BLUE, width=1.0)
    lines = [Line("interval", grid.layers, upper, lower, upper, style=edge), Line("", grid.layers, lower, style=edge)]
    measured = np.where(grid.floor, np.nan, grid.values["log10_measured"])
    lines += [
        Line("measured" if column == 0 else "", grid.layers, values, style=Style(VERMILION, "o", width=0.9))
        for column, values in enumerate(measured.T)
    ]
    guides = [Guide(0.0, "")]
    if rounding.any():
        guides.append(Guide(float(grid.layers[rounding][0]) - 0.5, "rounding", "floor", axis="x"))
    return LineChart(title, tuple(lines), guides=tuple(guides))


def _slacks(run: Run, stack: str | None) -> LineChart:
    names = {PUBLISHED: ("multi-head collapse (Dong et al.)", VERMILION), OURS: ("this interval", BLUE)}
    lines = []
    for theorem, (name, colour) in names.items():
        if theorem in theorems_in(run.table):
            grid = grid_of(run.table, theorem, "layer", stack)
            slack = np.where(grid.floor.any(axis=1), np.nan, grid.mean("log10_slack"))
            if np.isfinite(slack).any():
                lines.append(Line(name, grid.layers, slack, style=Style(colour, "o", width=1.0)))
    return LineChart(
        "upper bound over measured value, log10", tuple(lines), y_range=(0, None), empty="nothing measured"
    )
