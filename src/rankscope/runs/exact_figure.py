"""An exact run as a figure: the residual itself, and the digits in which tokens agree, where order 3 is straight."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from rankscope.runs.exactness import exact_curves, order_of
from rankscope.runs.figure import FAINT, FLOOR_GREY, INK
from rankscope.runs.sheet import sheet
from rankscope.runs.summary import stacks_of
from rankscope.runs.text import facts_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

STYLES = {
    "exact": ("#0072B2", "o", "-", 2.0),
    "float64": ("#009E73", "s", "--", 1.3),
    "float32": ("#D55E00", "^", "--", 1.3),
    "law": ("#000000", "x", "none", 1.2),
}
OTHER = ("#CC79A7", "v", "--", 1.3)
HEIGHT = 3.4
DEEPEST_SHOWN = -40.0


def draw_exact(run: Run) -> Figure:
    """Left, log10 of the relative residual; right, the same as digits of agreement on a logarithmic axis.

    On the right a block of order 3 multiplies the digits by three, so that order 3 is a straight line of slope log 3,
    and the float formats end at their floors.

    Raises:
        MissingExtraError: without matplotlib.
    """
    stacks = stacks_of(run.table)
    words = textwrap.wrap(run.verdict, 125)
    head = 0.42 + 0.17 * len(words)
    height = HEIGHT * len(stacks) + head
    with sheet("Run.plot", 9.4, height) as figure:
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head / height))
        figure.text(0.012, 1 - 0.1 / height, facts_line(run), va="top", weight="bold", size=9.5, color=INK)
        figure.text(0.012, 1 - 0.32 / height, "\n".join(words), va="top", size=8.5, color=INK, linespacing=1.3)
        for row, stack in enumerate(stacks):
            left, right = (figure.add_subplot(len(stacks), 2, 2 * row + column + 1) for column in (0, 1))
            _residuals(left, run, stack)
            _digits(right, run, stack)
    return figure


def _residuals(axes: Axes, run: Run, stack: str | None) -> None:
    for name, line in exact_curves(run.table, "log10_relative_residual", stack).items():
        colour, marker, style, width = STYLES.get(name, OTHER)
        axes.plot(line.layers, line.mean, color=colour, marker=marker, ms=4, linestyle=style, lw=width, label=name)
    low, high = axes.get_ylim()
    if low < DEEPEST_SHOWN:
        axes.set_ylim(DEEPEST_SHOWN, max(1.0, min(high, 2.0)))
        axes.annotate("goes on, see right", (0.02, 0.02), xycoords="axes fraction", size=7.5, color=FAINT)
    _dress(axes, "log10 of the relative residual", stack)
    axes.legend(frameon=False, fontsize=7.5, loc="best")


def _digits(axes: Axes, run: Run, stack: str | None) -> None:
    axes.set_yscale("log")
    for name, line in exact_curves(run.table, "log10_relative_residual", stack).items():
        colour, marker, style, width = STYLES.get(name, OTHER)
        digits = -line.mean
        known = digits > 0
        axes.plot(line.layers[known], digits[known], color=colour, marker=marker, ms=4, linestyle=style, lw=width)
    low, high = axes.get_ylim()
    for name, floor in run.floor["formats"].items():
        level = -np.log10(floor)
        axes.axhline(level, color=FLOOR_GREY, lw=0.9, zorder=0)
        axes.annotate(f"{name} ends", (0.01, level), xycoords=axes.get_yaxis_transform(), va="bottom", size=7,
                      color=FAINT)  # fmt: skip
        high = max(high, 1.6 * level)
    _slope_of_three(axes, run, stack)
    axes.set_ylim(low, high)
    _dress(axes, "digits in which tokens agree", stack)


def _slope_of_three(axes: Axes, run: Run, stack: str | None) -> None:
    """A guide: three times the digits with each block, through the last point."""
    line = exact_curves(run.table, "log10_relative_residual", stack)["exact"]
    if order_of(run.table, stack)[0] != 3 or line.layers.size < 2:
        return
    guide = -line.mean[-1] * 3.0 ** (line.layers - line.layers[-1])
    axes.plot(line.layers, guide, color=INK, lw=0.8, linestyle=(0, (1, 2)), zorder=1)
    near_end = max(0, line.layers.size - 2)
    axes.annotate("times 3 with each block", (line.layers[near_end], guide[near_end]), xytext=(-8, 4), ha="right",
                  textcoords="offset points", size=7.5, color=INK)  # fmt: skip


def _dress(axes: Axes, title: str, stack: str | None) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(f"{stack}: {title}" if stack else title, loc="left", size=9, weight="bold", color=INK)
    axes.set_xlabel("block")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
