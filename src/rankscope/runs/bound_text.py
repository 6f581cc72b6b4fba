"""A bound run as plain text: one table per theorem, layers down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.runs.bounds import TheoremGrid, grid_of, rows_of, theorems_in
from rankscope.runs.summary import shown_lines, stacks_of
from rankscope.runs.text import facts_line

if TYPE_CHECKING:
    from rankscope.runs.run import Run

HEADINGS = {
    "log10_factor": "log10 factor",
    "log10_lower_bound": "log10 lower",
    "log10_measured": "log10 measured",
    "log10_bound": "log10 upper",
    "log10_slack": "log10 slack",
}


def bound_as_text(run: Run) -> str:
    """Verdict, then for each theorem its sentence, its layers, its depth and the hypotheses it fails."""
    parts = [f"{run.kind}: {facts_line(run)}", f"Verdict: {run.verdict}"]
    stacks = stacks_of(run.table)
    parts += [_theorem(run, theorem, stack) for theorem in theorems_in(run.table) for stack in stacks]
    parts.append(
        "log10, mean over sequences; margin: of the hypothesis nearest to failing or failing most, below 0 fails."
    )
    parts += [f"Note: {note}" for note in run.notes]
    return "\n\n".join(part for part in parts if part)


def _theorem(run: Run, theorem: str, stack: str | None) -> str:
    cites = ", ".join(run.extra.get("citations", {}).get(theorem, ())) or "ours"
    title = f"{theorem} ({cites}){f', {stack}' if stack else ''}: {run.extra['quantities'][theorem]}"
    lines = [title, run.extra["sentences"][theorem]]
    grid = grid_of(run.table, theorem, "layer", stack)
    if grid.layers.size:
        lines.append(_table(grid))
    depth = grid_of(run.table, theorem, "depth", stack)
    if depth.layers.size:
        words = [f"{HEADINGS[name]} {_number(depth.mean(name)[0])}" for name in HEADINGS if _any(depth, name)]
        lines.append("whole depth: " + ", ".join(words))
    failing = _failing(run, theorem, stack)
    if failing:
        lines.append("not met: " + "; ".join(failing))
    return "\n".join(lines)


def _table(grid: TheoremGrid) -> str:
    metrics = [name for name in HEADINGS if _any(grid, name)]
    means = {name: grid.mean(name) for name in metrics}
    margins = bool(np.isfinite(grid.least_margin).any())
    head = ["block", *(HEADINGS[name] for name in metrics), *(["margin"] if margins else [])]
    rows = []
    for position in shown_lines(grid.layers.size):
        if position is None:
            rows.append(["..."] * len(head))
            continue
        mark = "*" if grid.floor[position].any() else ""
        cells = [_number(means[name][position]) + (mark if name == "log10_measured" else "") for name in metrics]
        rows.append([str(grid.layers[position]), *cells, *([_number(grid.least_margin[position])] if margins else [])])
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    return "\n".join("  ".join(w.rjust(n) for w, n in zip(row, widths, strict=True)) for row in (head, rule, *rows))


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
        return "undefined"
    if np.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:.3g}" if abs(value) >= 1000 or (value and abs(value) < 0.01) else f"{value:.2f}"
