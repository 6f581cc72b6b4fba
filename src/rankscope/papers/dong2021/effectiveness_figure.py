"""Accuracy by path length in both meanings, and what the sums of all paths of a length carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.papers._drawing import FAINT, INK, Style, draw_line, figure_with_head, legend_below, settle_axes
from rankscope.papers.dong2021.effectiveness_lines import (
    LINES,
    by_seed,
    curve,
    guess,
    lengths,
    published_facts,
    seeds,
)
from rankscope.papers.training.intervals import MeanInterval
from rankscope.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = {
    ("recomputed", "5"): Style("#E69F00", "v", "recomputed, 5", ":"),
    ("recomputed", "20"): Style("#D55E00", "s", "recomputed, 20"),
    ("frozen", "5"): Style("#56B4E9", "^", "frozen, 5", ":"),
    ("frozen", "20"): Style("#0072B2", "o", "frozen, 20"),
    ("frozen", "all"): Style("#000000", "D", "frozen, all paths", "--"),
    ("frozen, offset set right", "all"): Style("#8a8a8a", "P", "all, offset set right", "-."),
}
TITLES = {
    "sort": "Sorting 8 symbols",
    "hull": "Corners of the convex hull of 10 points",
    "memory": "Learning bits by heart",
}
GUESSES = {
    "constant": "one answer for all",
    "position": "best answer per position",
    "token alone": "best answer per token alone",
    "twins": "most a model without positions can reach",
}
SIZE_STYLE, RESIDUAL_STYLE = Style("#009E73", "o", "size over output"), Style("#CC79A7", "s", "relative residual")


def draw_effectiveness(run: Run) -> dict[str, Figure]:
    """Two panels."""
    task = str(run.extra["task"])
    figure, grid = figure_with_head(
        1,
        2,
        f"{TITLES[task]}: what is left when only paths of one length are kept?",
        f"{run.extra['layers']} attention layers, {run.extra['heads']} heads, width {run.extra['width']}, skips and "
        f"LayerNorm, no MLP; means over {seeds(run)} trained networks. Bands: 95% interval of the mean for 20 paths "
        "(left), range over networks (right). Attention frozen as the whole network has it (theorem 2.1), or "
        "recomputed from what a path carries.",
        panel=(4.1, 3.1),
        legend_rows=2,
    )
    left, right = grid[0]
    for key in LINES:
        _draw_accuracy(left, curve(run, "accuracy", *key), STYLES[key], banded=key[1] == "20")
    _horizontals(left, run, task)
    left.set_ylabel("accuracy")
    left.set_ylim(0.0, 1.04)
    for metric, style in (("size_over_output", SIZE_STYLE), ("relative_residual", RESIDUAL_STYLE)):
        _draw_range(right, run, metric, style)
    right.set_yscale("log")
    right.set_ylabel("of the sum of all paths of the length")
    right.legend(
        handles=[right.lines[index] for index in (0, 2)],
        labels=[SIZE_STYLE.label, RESIDUAL_STYLE.label],
        loc="best",
        frameon=False,
        fontsize=7.5,
    )
    for axes in (left, right):
        axes.set_xlabel("length of the path (attention layers entered)")
        settle_axes(axes, lengths(run)[-1])
    legend_below(figure, [STYLES[key] for key in LINES], rows=2)
    return {"figure": figure}


def _draw_accuracy(axes: Axes, points: list[MeanInterval], style: Style, *, banded: bool) -> None:
    mean = np.array([point.mean for point in points])
    half = np.array([point.half for point in points])
    band = (mean - half, mean + half) if banded and np.isfinite(half).all() else None
    draw_line(axes, np.arange(mean.size), mean, band, style, least=None)


def _draw_range(axes: Axes, run: Run, metric: str, style: Style) -> None:
    values = np.array([by_seed(run, metric, layer=length, of="frozen", paths="all") for length in lengths(run)])
    band = (values.min(axis=1), values.max(axis=1))
    draw_line(axes, np.arange(len(values)), values.mean(axis=1), band, style, least=1e-12)


def _horizontals(axes: Axes, run: Run, task: str) -> None:
    whole = guess(run, "whole")
    assert whole is not None
    axes.axhline(whole.mean, color=INK, linewidth=1.0)
    _label(
        axes,
        whole.mean,
        f"whole network {whole.mean:.3f} (published {published_facts(task)['whole']:.2f})",
        above=False,
    )
    for name, words in GUESSES.items():
        found = guess(run, name)
        if found is not None:
            axes.axhline(found.mean, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
            least = min(point.mean for key in LINES for point in curve(run, "accuracy", *key))
            height = min(found.mean, least - 0.02) if name == "constant" else found.mean
            _label(axes, height, f"{words} {found.mean:.2f}", above=name != "constant")


def _label(axes: Axes, height: float, words: str, *, above: bool) -> None:
    axes.text(
        0.99,
        height + (0.008 if above else -0.008),
        words,
        transform=axes.get_yaxis_transform(),
        ha="right",
        va="bottom" if above else "top",
        size=6.8,
        color="#444444",
        zorder=5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.75},
    )
