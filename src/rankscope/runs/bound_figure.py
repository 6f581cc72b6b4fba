"""A bound run as a figure: the measured contraction between our bounds, and the published bound far above."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from rankscope.runs.bounds import OURS, PUBLISHED, TheoremGrid, grid_of, theorems_in
from rankscope.runs.figure import INK
from rankscope.runs.sheet import sheet
from rankscope.runs.summary import stacks_of
from rankscope.runs.text import facts_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

BLUE, RED, GREY = "#0072B2", "#D55E00", "#777777"
HEIGHT = 3.3


def draw_bound(run: Run) -> Figure:
    """Left: the contraction of each layer inside its interval. Right: how far each upper bound lies above.

    Raises:
        MissingExtraError: without matplotlib.
    """
    words = textwrap.wrap(run.verdict, 125)
    head = 0.42 + 0.17 * len(words)
    total = HEIGHT + head
    with sheet("Run.plot", 9.6, total) as figure:
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head / total))
        figure.text(0.012, 1 - 0.1 / total, facts_line(run), va="top", weight="bold", size=9.5, color=INK)
        figure.text(0.012, 1 - 0.32 / total, "\n".join(words), va="top", size=8.5, color=INK)
        left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
        stack = stacks_of(run.table)[0]
        _interval(left, run, stack)
        _slacks(right, run, stack)
        for axes in (left, right):
            _finish(axes)
    return figure


def _interval(axes: Axes, run: Run, stack: str | None) -> None:
    axes.set_title("residual after attention over before, log10", size=9)
    grid = grid_of(run.table, OURS, "layer", stack)
    if not grid.layers.size:
        axes.text(0.5, 0.5, "not evaluated", transform=axes.transAxes, ha="center", color=GREY)
        return
    lower, upper = grid.mean("log10_lower_bound"), grid.mean("log10_bound")
    measured = np.where(grid.floor, np.nan, grid.values["log10_measured"])
    upper = np.where(grid.floor.all(axis=1), np.nan, upper)
    shown = np.where(np.isfinite(lower) & np.isfinite(upper), lower, np.nan)
    axes.fill_between(grid.layers, shown, upper, color=BLUE, alpha=0.15, linewidth=0, label="interval")
    axes.plot(grid.layers, upper, color=BLUE, linewidth=1)
    axes.plot(grid.layers, shown, color=BLUE, linewidth=1)
    if "log10_rms_gain" in grid.values:
        random = np.where(np.isnan(upper), np.nan, grid.mean("log10_rms_gain"))
        axes.plot(grid.layers, random, color=GREY, linewidth=1, linestyle=":", label="random residual")
    for column in range(measured.shape[1]):
        label = "measured" if column == 0 else None
        axes.plot(grid.layers, measured[:, column], color=RED, marker="o", markersize=3, linewidth=0.9, label=label)
    axes.axhline(0, color=INK, linewidth=0.6)
    _mark_floor(axes, grid)
    axes.legend(frameon=False, fontsize=7.5)


def _mark_floor(axes: Axes, grid: TheoremGrid) -> None:
    """A grey ground from the first block on whose residual is rounding."""
    below = grid.layers[grid.floor.all(axis=1)]
    axes.set_xlim(grid.layers[0] - 0.3, grid.layers[-1] + 0.3)
    if below.size:
        axes.axvspan(below[0] - 0.5, grid.layers[-1] + 0.3, color="#f0f0f0", linewidth=0)
        axes.text(below[0] - 0.4, 0.5, "rounding", transform=axes.get_xaxis_transform(), color=GREY, size=8)


def _slacks(axes: Axes, run: Run, stack: str | None) -> None:
    axes.set_title("upper bound over measured value, log10", size=9)
    names = {PUBLISHED: "multi-head collapse (Dong et al.)", OURS: "this interval"}
    for name, colour in ((PUBLISHED, RED), (OURS, BLUE)):
        if name not in theorems_in(run.table):
            continue
        grid = grid_of(run.table, name, "layer", stack)
        slack = np.where(grid.floor.any(axis=1), np.nan, grid.mean("log10_slack"))
        if np.isfinite(slack).any():
            axes.plot(grid.layers, slack, color=colour, marker="o", markersize=3, linewidth=1, label=names[name])
    if axes.get_legend_handles_labels()[0]:
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=7.5)
    else:
        axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center", color=GREY)


def _finish(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("block")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK)
