"""How an ``exact`` run is shown: the residual in each arithmetic by block, with the order and factor of each block."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from rankscope.runs.curves import Curve
from rankscope.runs.document import facts_line, run_document
from rankscope.runs.summary import shown_lines, stacks_of
from rankscope.verbs.exact.judge import exact_curves, order_of
from rankscope.views import Cell, Column, Document, Guide, Line, LineChart, Note, Plot, Row, Style, Table, number
from rankscope.views.palette import BLACK, BLUE, GREEN, INK, PURPLE, VERMILION

if TYPE_CHECKING:
    from rankscope.runs.run import Run

LAW = "law"
STYLES = {
    "exact": Style(BLUE, "o", "-", 2.0),
    "float64": Style(GREEN, "s", "--", 1.3),
    "float32": Style(VERMILION, "^", "--", 1.3),
    LAW: Style(BLACK, "x", "none", 1.2),
}
OTHER = Style(PURPLE, "v", "--", 1.3)
DECIMALS = {"order": 4, "factor": None, "linear_factor": None}
"""Decimals of the columns that are not logarithms; logarithms have three."""

CLOSE = -1.0
"""log10 of the relative residual below which an order is shown."""
FLOOR = "* at the float floor of its format"


def document(run: Run) -> Document:
    """log10 of the residual in each arithmetic, with order and factor, for each stack."""
    tables = tuple(exact_table(run, stack) for stack in stacks_of(run.table))
    return run_document(run, tables, legend={"floor": FLOOR})


def exact_table(run: Run, stack: str | None) -> Table:
    """The table of one stack, one row per block."""
    residuals = exact_curves(run.table, "log10_residual", stack)
    first = [name for name in ("exact", LAW) if name in residuals]
    lines = {name: residuals[name] for name in dict.fromkeys((*first, *residuals))}
    lines["relative"] = exact_curves(run.table, "log10_relative_residual", stack)["exact"]
    # Far from collapse the slope is that of no power: it would be printed as an order of, say, -29.
    met = lines["relative"].mean < CLOSE
    for name in ("order", "factor", "linear_factor"):
        if met.any() and (line := exact_curves(run.table, name, stack).get("exact")) is not None:
            kept = np.isin(line.layers, lines["relative"].layers[met])
            lines[name] = Curve(**{field.name: getattr(line, field.name)[kept] for field in fields(line)})
    layers = residuals["exact"].layers
    rows: list[Row] = [
        [
            str(layers[place]),
            *(_cell(line, int(layers[place]), DECIMALS.get(name, 3)) for name, line in lines.items()),
        ]
        for place in shown_lines(layers.size)
    ]
    columns = [Column(name.replace("_", " "), trend=line.mean.tolist()) for name, line in lines.items()]
    caption = f"log10 of the residual at block.out{f', {stack}' if stack else ''}"
    return Table(["block", *columns], rows, caption=caption)


def _cell(line: Curve, layer: int, digits: int | None) -> Cell:
    """The value at a layer with so many decimals; None writes three significant digits."""
    positions = np.flatnonzero(line.layers == layer)
    if not positions.size:
        return Cell("")
    value, floor = float(line.mean[positions[0]]), bool(line.any_floor[positions[0]])
    if np.isneginf(value):
        return Cell("-inf")  # the logarithm of an exact zero
    text = number(value) if digits is None else f"{value:.{digits}f}"
    return Cell(text if np.isfinite(value) else "floor" if floor else "", ("floor",) if floor else ())


def plot(run: Run) -> Plot:
    """The digits in which tokens agree, on a logarithmic axis, one panel for each stack.

    A block of order 3 multiplies the digits by three, so that order 3 is a straight line of slope log 3,
    and the float formats end at their floors.
    """
    panels = [_digits(run, stack) for stack in stacks_of(run.table)]
    return Plot(run.verdict, facts_line(run), tuple(panels), columns=len(panels), panel_size=(5.6, 3.4))


def _digits(run: Run, stack: str | None) -> LineChart:
    curves = exact_curves(run.table, "log10_relative_residual", stack)
    lines = []
    for name, line in curves.items():
        known = -line.mean > 0
        floor, style = line.any_floor[known], STYLES.get(name, OTHER)
        lines.append(Line(name, line.layers[known], -line.mean[known], floor=floor, style=style))
    guides = [Guide(float(-np.log10(floor)), f"{name} ends") for name, floor in run.floor["formats"].items()]
    every = np.concatenate([np.asarray(line.y, dtype=np.float64) for line in lines])
    every = every[np.isfinite(every)]
    low, high = float(every.min(initial=np.inf)) / 1.3, float(every.max(initial=0.0)) * 1.3
    tops = [1.6 * guide.value for guide in guides]
    drawn, notes = _slope_of_three(run, stack)
    return LineChart(
        _titled("digits in which tokens agree", stack),
        (*lines, *drawn),
        guides=tuple(guides),
        notes=notes,
        log=True,
        y_range=(low, max([high, *tops])) if every.size else None,
        names="legend",
    )


def _slope_of_three(run: Run, stack: str | None) -> tuple[tuple[Line, ...], tuple[Note, ...]]:
    """A guide: three times the digits with each block, through the last point."""
    line = exact_curves(run.table, "log10_relative_residual", stack)["exact"]
    if order_of(run.table, stack) != 3 or line.layers.size < 2 or not np.isfinite(line.mean[-1]):
        return (), ()
    guide = -line.mean[-1] * 3.0 ** (line.layers - line.layers[-1])
    near_end = max(0, line.layers.size - 2)
    note = Note("times 3 with each block", float(line.layers[near_end]), float(guide[near_end]))
    return (Line("", line.layers, guide, style=Style(INK, dash=(0, (1, 2)), width=0.8)),), (note,)


def _titled(title: str, stack: str | None) -> str:
    return f"{stack}: {title}" if stack else title
