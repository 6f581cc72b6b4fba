"""An exact run as plain text: blocks down, arithmetics across."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.runs.exactness import exact_curves
from rankscope.runs.summary import shown_lines, stacks_of
from rankscope.runs.text import facts_line, number, verdict_lines

if TYPE_CHECKING:
    from rankscope.runs.curves import Curve
    from rankscope.runs.run import Run

LAW = "law"


def exact_as_text(run: Run) -> str:
    """Verdict, then log10 of the residual in each arithmetic, with order and factor, for each stack."""
    parts = [f"{run.kind}: {facts_line(run)}", verdict_lines(run)]
    for stack in stacks_of(run.table):
        head, rows = exact_rows(run, stack)
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines = [head, ["-" * width for width in widths], *rows]
        title = f"log10 of the residual at block.out{f', {stack}' if stack else ''}"
        table = ("  ".join(w.rjust(n) for w, n in zip(line, widths, strict=True)) for line in lines)
        parts.append("\n".join([title, *table]))
    parts += [f"Note: {note}" for note in run.notes]
    return "\n\n".join(parts)


def exact_rows(run: Run, stack: str | None) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of one stack."""
    residuals = exact_curves(run.table, "log10_residual", stack)
    others = {
        name: line
        for name in ("order", "factor", "linear_factor")
        if (line := exact_curves(run.table, name, stack).get("exact")) is not None
    }
    relative = exact_curves(run.table, "log10_relative_residual", stack)["exact"]
    order = [name for name in ("exact", LAW) if name in residuals]
    order += [name for name in residuals if name not in order]
    head = ["block", *order, "relative", *(name.replace("_", " ") for name in others)]
    layers = residuals["exact"].layers
    rows = []
    for position in shown_lines(layers.size):
        if position is None:
            rows.append(["..."] * len(head))
            continue
        layer = int(layers[position])
        cells = [_power(residuals[name], layer) for name in order]
        rows.append(
            [str(layer), *cells, _power(relative, layer), *(_plain(others[name], layer, name) for name in others)]
        )
    return head, rows


def _at(line: Curve, layer: int) -> tuple[float, bool]:
    found = np.flatnonzero(line.layers == layer)
    return (float(line.mean[found[0]]), bool(line.any_floor[found[0]])) if found.size else (float("nan"), False)


def _power(line: Curve, layer: int) -> str:
    value, at_floor = _at(line, layer)
    if np.isneginf(value):
        return "-inf"
    if not np.isfinite(value):
        return "floor*" if at_floor else ""
    return f"{value:.3f}" + ("*" if at_floor else "")


def _plain(line: Curve, layer: int, name: str) -> str:
    value, at_floor = _at(line, layer)
    if not np.isfinite(value):
        return "floor*" if at_floor else ""
    return (f"{value:.4f}" if name == "order" else number(value)) + ("*" if at_floor else "")
