"""A decomposition as a figure: share of the output, residual and number of paths, by length."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rankscope.runs.decomposition import SHARE, by_length
from rankscope.runs.figure import INK
from rankscope.runs.sheet import sheet
from rankscope.runs.summary import stacks_of
from rankscope.runs.text import facts_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
TITLES = ("share of the output", "relative residual", "number of paths")


def draw_decomposition(run: Run) -> Figure:
    """Three panels for the run, one line per stack.

    Raises:
        MissingExtraError: without matplotlib.
    """
    return draw_decompositions({"": run})


def draw_decompositions(runs: Mapping[str, Run]) -> Figure:
    """Several runs side by side, one line for each, by name; bands are over sequences."""
    first = next(iter(runs.values()))
    words = textwrap.wrap(first.verdict, 120) if len(runs) == 1 else []
    head = 0.4 + 0.17 * len(words)
    with sheet("Run.plot", 9.6, 2.9 + head) as figure:
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head / (2.9 + head)))
        title = facts_line(first) if len(runs) == 1 else ", ".join(runs)
        figure.text(0.012, 1 - 0.1 / (2.9 + head), title, va="top", weight="bold", size=9.5, color=INK)
        figure.text(0.012, 1 - 0.32 / (2.9 + head), "\n".join(words), va="top", size=8.5, color=INK)
        panels = [figure.add_subplot(1, 3, position + 1) for position in range(3)]
        for number, (name, run) in enumerate(runs.items()):
            _draw_lines(panels, run, name, number)
        for axes, title in zip(panels, TITLES, strict=True):
            _finish(axes, title)
        if len(runs) > 1 or len(stacks_of(first.table)) > 1:
            panels[0].legend(frameon=False, fontsize=7.5)
    return figure


def _draw_lines(panels: list[Axes], run: Run, name: str, number: int) -> None:
    for order, stack in enumerate(stacks_of(run.table)):
        colour = COLOURS[(number + order) % len(COLOURS)]
        style = "-" if number == 0 else "--"
        label = " ".join(part for part in (name, stack) if part)
        for axes, metric in zip(panels, (SHARE, "relative_residual"), strict=False):
            line = by_length(run.table, metric, stack)
            axes.fill_between(line.lengths, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(line.lengths, line.mean, style, color=colour, marker="o", markersize=3, label=label)
        counts = [int(count) for count in run.extra["path_counts"][str(stack or "")]]
        shown = [k for k, count in enumerate(counts) if count]
        panels[2].plot(
            shown, [float(np.float64(counts[k])) for k in shown], style, color=colour, marker="o", markersize=3
        )


def _finish(axes: Axes, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, size=9)
    axes.set_xlabel("length of the paths")
    axes.set_yscale("log" if title == TITLES[2] else "linear")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK)
