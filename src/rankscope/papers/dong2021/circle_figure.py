"""Trajectories on the plane, and the distance between the two points, in float64 and exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.papers._drawing import FAINT, INK, Style, figure_with_head, legend_below, plain_axes
from rankscope.papers.dong2021.circle_lines import RADIUS, Free, networks, variants, widths
from rankscope.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIRST, SECOND = "#D55E00", "#0072B2"
STYLES = (
    Style("#D55E00", "s", "attention"),
    Style("#0072B2", "o", "attention + skip", "--"),
    Style("#CC79A7", "^", "attention + MLP", "-."),
    Style("#009E73", "D", "attention + skip + MLP", ":"),
)
LEAST, MOST, SHOWN = -24.0, 6.5, 0.62


def draw_circle(run: Run) -> dict[str, Figure]:
    """One row per width: four trajectories, then the distances."""
    figure, grid = figure_with_head(
        len(widths(run)),
        len(STYLES) + 1,
        "Two points sent round a circle by one trained block, applied to its own output",
        f"{run.extra['steps']} steps of a thousandth of a turn (the grey circle is the target). Trajectories: one of "
        f"{run.extra['seeds']} trained blocks, cross where one leaves the picture. Right: distance between the "
        "points for every block, exact (lines) and as float64 has it (dots).",
        panel=(2.05, 2.15),
    )
    for row, width in zip(grid, widths(run), strict=True):
        for axes, name in zip(row, variants(run), strict=False):
            _trajectory(axes, networks(run, name, width)[0])
            axes.set_title(name, size=8.5, color=INK)
        row[0].set_ylabel(f"width {width}", color=INK)
        for name, style in zip(variants(run), STYLES, strict=True):
            for free in networks(run, name, width):
                _distance(row[-1], free, style)
        row[-1].set_ylim(LEAST, MOST)
        row[-1].set_title("log10 of the distance", size=8.5, color=INK)
        row[-1].set_xlabel("steps")
        row[-1].set_xscale("symlog", linthresh=1)
        row[-1].set_xlim(0, run.extra["steps"])
        row[-1].set_xticks([0, 1, 10, 100], ["0", "1", "10", "100"])
        row[-1].axhline(-16, color=FAINT, linewidth=0.7, linestyle=(0, (4, 3)))
        plain_axes(row[-1])
    legend_below(figure, STYLES)
    return {"figure": figure}


def _trajectory(axes: Axes, free: Free) -> None:
    turn = np.linspace(0, 2 * np.pi, 200)
    axes.plot(RADIUS * np.cos(turn), RADIUS * np.sin(turn), color="#cccccc", linewidth=3.0, zorder=1)
    for first, colour in ((0, FIRST), (2, SECOND)):
        path = free.places[: _seen(free), first : first + 2]
        axes.plot(path[:, 0], path[:, 1], color=colour, linewidth=1.1, marker=".", markersize=2.0, zorder=3)
        axes.plot(*path[0], marker="o", markersize=4.5, markerfacecolor="white", markeredgecolor=colour, zorder=4)
        last = np.clip(path[-1], -0.95 * SHOWN, 0.95 * SHOWN)
        axes.plot(*last, marker="x" if np.any(last != path[-1]) else "o", markersize=4.5, color=colour, zorder=4)
    axes.set_xlim(-SHOWN, SHOWN)
    axes.set_ylim(-SHOWN, SHOWN)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[["top", "right", "bottom", "left"]].set_color("#cccccc")


def _seen(free: Free) -> int:
    """Steps until both points have left the picture for the first time."""
    outside = np.abs(free.places).reshape(-1, 2, 2).max(axis=-1).min(axis=-1) > SHOWN
    return int(np.argmax(outside)) + 1 if outside.any() else len(free.places)


def _distance(axes: Axes, free: Free, style: Style) -> None:
    steps = np.arange(free.exact.size)
    known = np.where(np.isfinite(free.exact), free.exact, LEAST - 5)
    axes.plot(steps, np.maximum(known, LEAST - 5), color=style.colour, linestyle=style.dash, linewidth=1.2)
    seen = np.flatnonzero(free.distance > 0)
    marked = np.unique(np.geomspace(1, seen.size, 12).astype(int)) - 1
    axes.plot(
        seen[marked],
        np.log10(free.distance[seen[marked]]),
        linestyle="none",
        marker=style.marker,
        markersize=2.4,
        color=style.colour,
    )
