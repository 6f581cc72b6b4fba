"""Shares by path length for every gain, and what long paths cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.papers._drawing import INK, Style, draw_line, figure_with_head, plain_axes, settle_axes
from rankscope.papers.dong2021.long_paths import FIXED
from rankscope.papers.dong2021.long_paths_lines import Arm, arms
from rankscope.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#000000", "#56B4E9", "#0072B2", "#009E73", "#E69F00", "#D55E00")
MARKERS = ("o", "s", "^", "D", "v", "P")


def draw_long_paths(run: Run) -> dict[str, Figure]:
    """Three panels: shares, and accuracy and loss over the mean length of what is carried."""
    figure, grid = figure_with_head(
        1,
        3,
        "Can a network be made to use its long paths?",
        f"Sorting, {run.extra['layers']} attention layers with skips turned down to a gain g: falling over the first "
        f"60% of training (solid, filled) or from the start (dashed, hollow). {run.extra['seeds']} networks each; "
        "mean length: mean of the path length, weighted with the size of its share.",
        panel=(3.3, 2.9),
    )
    shares, accuracy, loss = grid[0]
    for each in arms(run):
        style = _style(run, each)
        draw_line(shares, np.arange(each.shares.shape[1]), each.shares.mean(axis=0), None, style, least=None)
        _cross(accuracy, each, each.accuracy, style)
        _cross(loss, each, each.loss, style)
    shares.set_ylabel("share of the output")
    shares.set_xlabel("length of the path")
    settle_axes(shares, int(run.extra["layers"]))
    shares.axhline(0.0, color=INK, linewidth=0.6)
    shares.legend(handles=_handles(run), frameon=False, fontsize=7.4, labelcolor=INK)
    for axes, words in ((accuracy, "accuracy on unseen sequences"), (loss, "loss at the end of training")):
        axes.set_xlabel("mean length of what is carried")
        axes.set_ylabel(words)
        axes.set_xlim(-0.2, run.extra["layers"] + 0.3)
        plain_axes(axes)
    accuracy.set_ylim(0.0, 1.04)
    if max(float(each.loss.max()) for each in arms(run)) > 5 * min(float(each.loss.min()) for each in arms(run)):
        loss.set_yscale("log")
    return {"figure": figure}


def _style(run: Run, each: Arm) -> Style:
    place = [float(gain) for gain in run.extra["gains"]].index(each.gain) % len(COLOURS)
    return Style(COLOURS[place], MARKERS[place], f"g = {each.gain:g}", "--" if _is_hollow(each) else "-")


def _is_hollow(each: Arm) -> bool:
    return each.schedule == FIXED and each.gain != 1.0


def _cross(axes: Axes, each: Arm, values: np.ndarray, style: Style) -> None:
    axes.plot(
        each.lengths,
        values,
        linestyle="none",
        marker=style.marker,
        markersize=5,
        markerfacecolor="white" if _is_hollow(each) else style.colour,
        markeredgecolor=style.colour,
        zorder=3,
    )


def _handles(run: Run) -> list[object]:
    from matplotlib.lines import Line2D

    found: list[object] = []
    for place, gain in enumerate(run.extra["gains"]):
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        found.append(Line2D([], [], color=colour, marker=marker, markersize=4, label=f"g = {float(gain):g}"))
    return found
