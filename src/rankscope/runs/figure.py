"""A run as a figure: one panel per metric, depth to the right, a band over sequences."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from rankscope.runs.curves import Curve, curve, names_in
from rankscope.runs.sheet import sheet
from rankscope.runs.summary import headline, main_site, stacks_of, summarise
from rankscope.runs.text import facts_line, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

# Okabe-Ito colours that keep their order of lightness in grey print; lines differ in marker and dash as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v")
INK, FAINT, FLOOR_GREY = "#222222", "#8a8a8a", "#bdbdbd"
LOG_DECADES = 2.0
PANEL_INCHES = (3.5, 2.45)
NARROWEST_INCHES = 5.2
MOST_COLUMNS = 3
MOST_PANELS = 9
MARKED_LAYERS = 40
RELATIVE = ("relative_", "residual")


def draw(run: Run, *, metrics: Sequence[str] | None = None, site: str | None = None) -> Figure:
    """Draw the chosen metrics over depth.

    The line is the mean over sequences (and heads), the band runs from the 10% to the 90% quantile. Values at the float
    floor are hollow, the floor itself is a hatched zone, the same-shape random null a dashed line.

    Args:
        run: what to draw.
        metrics: panels, in order; the headline metrics by default.
        site: site of every panel; by default the main site of each metric.

    Raises:
        MissingExtraError: without matplotlib.
        UnknownNameError: for a metric or site that the run does not hold.
    """
    if run.table.num_rows:
        summarise(run.table, metrics=metrics, site=site)
    chosen = list(metrics) if metrics is not None else headline(run.table, MOST_PANELS)
    columns = max(1, min(len(chosen), MOST_COLUMNS))
    rows = max(1, math.ceil(len(chosen) / columns))
    width = max(PANEL_INCHES[0] * columns, NARROWEST_INCHES)
    subject, verdict = textwrap.wrap(facts_line(run), int(width * 12)), textwrap.wrap(run.verdict, int(width * 14.5))
    below = 0.14 + 0.18 * len(subject)
    head = below + 0.17 * len(verdict) + 0.12
    height = PANEL_INCHES[1] * rows + head
    with sheet("Run.plot", width, height) as figure:
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head / height), hspace=0.06, wspace=0.04)
        figure.text(0.012, 1 - 0.1 / height, "\n".join(subject), va="top", weight="bold", size=9.5, color=INK)
        figure.text(0.012, 1 - below / height, "\n".join(verdict), va="top", size=8.5, color=INK, linespacing=1.35)
        for position, metric in enumerate(chosen):
            axes = figure.add_subplot(rows, columns, position + 1)
            _panel(axes, run, metric, site or main_site(run.table, metric), last=position + columns >= len(chosen))
    return figure


def _panel(axes: Axes, run: Run, metric: str, site: str, *, last: bool) -> None:
    lines = _lines(run, metric, site)
    logarithmic = _wants_log([line for _, line in lines])
    if logarithmic:
        axes.set_yscale("log")
    for order, (_, line) in enumerate(lines):
        _line(axes, line, order)
    _dress(axes, metric, site, last=last)
    if not any(np.isfinite(line.mean).any() for _, line in lines):
        axes.text(0.5, 0.5, "undefined in every block", transform=axes.transAxes, ha="center", va="center", color=FAINT)
        axes.set(xticks=[], yticks=[], xlabel="")
        axes.spines[:].set_visible(False)
        return
    _limits(axes, metric, lines, logarithmic=logarithmic)
    _null(axes, run, metric)
    _floor(axes, run, metric, logarithmic=logarithmic)
    if len(lines) > 1:
        _name_lines(axes, lines)


def _lines(run: Run, metric: str, site: str) -> list[tuple[str | None, Curve]]:
    found: list[tuple[str | None, Curve]] = []
    for stack in stacks_of(run.table):
        mine = (
            run.table if stack is None else run.table.filter(pc.fill_null(pc.equal(run.table["stack"], stack), False))
        )
        here = mine.filter(pc.equal(mine["metric"], metric))
        if site in names_in(here, "site"):
            found.append((stack, curve(here, metric, site)))
    return found


def _line(axes: Axes, line: Curve, order: int) -> None:
    colour, marker = COLOURS[order % len(COLOURS)], MARKERS[order % len(MARKERS)]
    style = "-" if order == 0 else (0, (5, 1.5))
    if line.layers.size == 1:
        axes.vlines(line.layers, line.low, line.high, color=colour, alpha=0.35, linewidth=4, zorder=2)
    axes.fill_between(line.layers, line.low, line.high, color=colour, alpha=0.18, linewidth=0, zorder=2)
    small = line.layers.size <= MARKED_LAYERS
    axes.plot(line.layers, line.mean, color=colour, linestyle=style, linewidth=1.5, zorder=3)
    if small:
        fill = [("white" if floor else colour) for floor in line.any_floor]
        axes.scatter(
            line.layers, line.mean, s=13, marker=marker, facecolors=fill, edgecolors=colour, linewidths=0.9, zorder=4
        )


def _wants_log(lines: list[Curve]) -> bool:
    known = np.concatenate([line.mean for line in lines]) if lines else np.empty(0)
    known = known[np.isfinite(known)]
    if known.size == 0 or known.min() <= 0:
        return False
    return bool(np.log10(known.max() / known.min()) > LOG_DECADES)


def _dress(axes: Axes, metric: str, site: str, *, last: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(metric.replace("_", " "), loc="left", size=9, weight="bold", color=INK, pad=5)
    axes.set_title(site, loc="right", size=7.5, color=FAINT, pad=5)
    if last:
        axes.set_xlabel("block")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3, width=0.7, colors=INK)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)


def _limits(axes: Axes, metric: str, lines: list[tuple[str | None, Curve]], *, logarithmic: bool) -> None:
    first = min(int(line.layers.min()) for _, line in lines)
    final = max(int(line.layers.max()) for _, line in lines)
    pad = max(0.5, 0.03 * (final - first))
    axes.set_xlim(first - pad, final + pad)
    if logarithmic:
        return
    low = min(float(line.low[np.isfinite(line.low)].min()) for _, line in lines if np.isfinite(line.low).any())
    high = max(float(line.high[np.isfinite(line.high)].max()) for _, line in lines if np.isfinite(line.high).any())
    if low >= 0.0 and high <= 1.05:
        axes.set_ylim(0.0, 1.05)
    elif low >= 0.0:
        axes.set_ylim(0.0, 1.12 * high if high > 0 else 1.0)


def _null(axes: Axes, run: Run, metric: str) -> None:
    reference: Any = (run.null or {}).get(metric)
    if not reference or not isinstance(reference.get("mean"), (int, float)):
        return
    level = float(reference["mean"])
    low, high = axes.get_ylim()
    room = level * 2.5 if axes.get_yscale() == "log" else level + 0.13 * (max(high, level) - low)
    axes.set_ylim(min(low, level), max(high, room))
    axes.axhline(level, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=2.5)
    _note(axes, level, f"same-shape random {number(level)}", above=True)


def _floor(axes: Axes, run: Run, metric: str, *, logarithmic: bool) -> None:
    relative = run.floor.get("relative")
    if not logarithmic or not metric.startswith(RELATIVE) or not isinstance(relative, (int, float)):
        return
    low, high = axes.get_ylim()
    if low > 30 * relative:
        return
    low = min(low, relative / 10)
    axes.set_ylim(low, high)
    axes.axhspan(low, relative, facecolor="#f2f2f2", edgecolor=FLOOR_GREY, hatch="////", linewidth=0, zorder=1)
    _note(axes, relative, f"{run.floor.get('dtype')} cannot see below {number(float(relative))}", above=False)


def _note(axes: Axes, level: float, words: str, *, above: bool) -> None:
    axes.annotate(
        words,
        xy=(0.985, level),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 2.5 if above else -2.5),
        textcoords="offset points",
        ha="right",
        va="bottom" if above else "top",
        size=7,
        color="#444444",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
        zorder=5,
    )


def _name_lines(axes: Axes, lines: list[tuple[str | None, Curve]]) -> None:
    """Write each stack's name at the end of its line, moved apart where ends meet."""
    ends = []
    for order, (stack, line) in enumerate(lines):
        known = np.flatnonzero(np.isfinite(line.mean))
        if known.size:
            ends.append((float(line.mean[known[-1]]), int(line.layers[known[-1]]), str(stack), order))
    low, high = axes.get_ylim()
    position = np.log if axes.get_yscale() == "log" else (lambda value: value)
    scale = float(position(high) - position(low)) or 1.0
    taken = -math.inf
    for value, layer, stack, order in sorted(ends):
        height = float(position(value) - position(low)) / scale
        placed = max(height, taken + 0.1)
        taken = placed
        axes.annotate(
            stack,
            xy=(layer, value),
            xytext=(1.01, min(placed, 1.0)),
            textcoords=axes.transAxes,
            va="center",
            size=7.5,
            weight="bold",
            color=COLOURS[order % len(COLOURS)],
            annotation_clip=False,
        )
