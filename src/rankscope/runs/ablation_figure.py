"""An ablation as a figure: one panel per mask and kind of weights, one line per variant."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rankscope._errors import InputError
from rankscope.runs.ablation import MEASURE, Arm, arms
from rankscope.runs.figure import FAINT, FLOOR_GREY, INK
from rankscope.runs.sheet import sheet
from rankscope.runs.text import facts_line, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

STYLES: dict[str, tuple[str, str, str]] = {
    "pure": ("#000000", "o", "-"),
    "+norm": ("#D55E00", "s", "-"),
    "+mlp": ("#CC79A7", "D", "-"),
    "+norm+mlp": ("#882255", "P", "-"),
    "+skip": ("#0072B2", "^", "-"),
    "+norm+skip": ("#56B4E9", "v", "-"),
    "full": ("#009E73", "X", "-"),
    "dong:san": ("#000000", "o", "--"),
    "dong:san+mlp": ("#CC79A7", "D", "--"),
    "dong:san+skip": ("#0072B2", "^", "--"),
}
OTHER = ("#666666", ".", ":")
PANEL_INCHES = (4.6, 3.3)


def draw_ablation(run: Run, *, metrics: Sequence[str] | None = None, site: str | None = None) -> Figure:
    """Draw the first of ``metrics`` over depth for every network; log axis, float floor hatched, band over sequences.

    Raises:
        MissingExtraError: without matplotlib.
        InputError: for a metric or site the run does not hold.
    """
    metric, site = (metrics or (MEASURE,))[0], site or "block.out"
    panels: dict[tuple[str, str, str | None], list[Arm]] = {}
    for arm in arms(run.table, metric, site):
        panels.setdefault((arm.weights, arm.mask, arm.stack), []).append(arm)
    if not panels:
        raise InputError(f"This ablation holds no {metric} at {site}.")
    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    rows = math.ceil(len(panels) / columns)
    width = max(PANEL_INCHES[0] * columns, 6.4)
    words = textwrap.wrap(run.verdict, int(width * 14))
    head = 0.42 + 0.17 * len(words)
    height = PANEL_INCHES[1] * rows + head
    with sheet("Run.plot", width, height) as figure:
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head / height))
        figure.text(0.012, 1 - 0.1 / height, facts_line(run), va="top", weight="bold", size=9.5, color=INK)
        figure.text(0.012, 1 - 0.32 / height, "\n".join(words), va="top", size=8.5, color=INK, linespacing=1.3)
        for position, (key, members) in enumerate(panels.items()):
            axes = figure.add_subplot(rows, columns, position + 1)
            draw_panel(axes, members, run.floor.get("relative"), str(run.floor.get("dtype")))
            axes.set_title(", ".join(part for part in (key[2], f"{key[0]} weights", f"{key[1]} mask") if part), size=9)
            axes.set_ylabel(metric.replace("_", " ") if position % columns == 0 else "")
            axes.set_xlabel("block" if position + columns >= len(panels) else "")
    return figure


def draw_panel(axes: Axes, members: list[Arm], floor: float | None, dtype: str) -> None:
    """The lines of one mask and one kind of weights."""
    from matplotlib.ticker import MaxNLocator

    axes.set_yscale("log")
    bottom = floor / 10 if floor is not None else np.finfo(float).tiny
    for order, arm in enumerate(members):
        colour, marker, style = STYLES.get(arm.variant, OTHER)
        x, line = arm.line.layers, arm.line
        known = np.isfinite(line.mean)
        level = np.maximum(line.mean, bottom)
        width = max(1.2, 3.6 - 0.45 * order)
        band = (np.maximum(line.low, bottom), np.maximum(line.high, bottom))
        axes.fill_between(x, *band, where=known, color=colour, alpha=0.13, linewidth=0)
        axes.plot(x[known], level[known], color=colour, linestyle=style, linewidth=width, label=arm.variant)
        fill = ["white" if at_floor else colour for at_floor in line.any_floor[known]]
        size = 12 * width
        axes.scatter(x[known], level[known], s=size, marker=marker, facecolors=fill, edgecolors=colour, zorder=3)
    low, high = axes.get_ylim()
    if floor is not None and low < 30 * floor:
        low = min(low, floor / 10)
        axes.axhspan(low, floor, facecolor="#f2f2f2", edgecolor=FLOOR_GREY, hatch="////", linewidth=0, zorder=0)
        axes.text(0.99, floor, f"{dtype} cannot see below {number(floor)}", transform=axes.get_yaxis_transform(),
                  ha="right", va="top", size=7, color="#444444",
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85})  # fmt: skip
    axes.set_ylim(low, max(high, 1.3))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=7.5, labelcolor=INK, loc="center right" if low < 1e-4 else "best")
    axes.tick_params(colors=INK)
    axes.xaxis.label.set_color(FAINT)
