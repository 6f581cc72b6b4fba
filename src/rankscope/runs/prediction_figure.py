"""A predicted run as a figure: the curves over depth, and the map of two parameters where there is one."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.runs.figure import COLOURS, FAINT, INK
from rankscope.runs.prediction import AGREEMENT
from rankscope.runs.prediction_text import SAMPLED, predicted_curves
from rankscope.runs.sheet import sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

DEEPEST_SHOWN = -12.0
DASHES = ("--", "-.", ":")
MARKED = 24


def draw_prediction(run: Run) -> Figure:
    """Left, log10 of the relative residual by block, with a line for each seed; right, the map if one was asked for.

    Raises:
        MissingExtraError: without matplotlib.
    """
    mapped = run.extra["map"]
    width = 10.4 if mapped else 6.4
    words = textwrap.wrap(run.verdict, int(width * 13.5))
    head = 0.42 + 0.17 * len(words)
    height = 3.9 + head
    with sheet("Run.plot", width, height) as figure:
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head / height))
        title = f"{run.extra['design']['name']} at initialisation, {run.provenance.sequences} seeds"
        figure.text(0.012, 1 - 0.1 / height, title, va="top", weight="bold", size=9.5, color=INK)
        figure.text(0.012, 1 - 0.32 / height, "\n".join(words), va="top", size=8.5, color=INK, linespacing=1.3)
        axes = figure.subplots(1, 2 if mapped else 1, squeeze=False)[0]
        _curves(axes[0], run)
        if mapped:
            _map(figure, axes[1], mapped)
    return figure


def _curves(axes: Axes, run: Run) -> None:
    curves = predicted_curves(run)
    for number, row in enumerate(curves[SAMPLED]):
        label = "sampled, one line per seed" if number == 0 else None
        axes.plot(np.arange(len(row)), row, color=COLOURS[0], lw=1.1, alpha=0.75, label=label)
    for number, (name, grid) in enumerate((n, g) for n, g in curves.items() if n != SAMPLED):
        colour, dash = ("#000000", *COLOURS[1:])[number % 5], DASHES[number % len(DASHES)]
        axes.plot(np.arange(grid.shape[1]), grid[0], color=colour, linestyle=dash, lw=1.6, label=name.replace("_", " "))
    depth = run.extra["design"]["depth"]
    low = max(DEEPEST_SHOWN, float(np.nanmin(curves[SAMPLED])) - 0.3)
    axes.set_ylim(min(low, math.log10(AGREEMENT) - 0.5), 0.15)
    axes.set_xlim(0, _furthest(curves, depth))
    axes.axhline(math.log10(AGREEMENT), color=FAINT, lw=0.8)
    if depth <= axes.get_xlim()[1]:
        axes.axvline(depth, color=FAINT, lw=0.8, linestyle=(0, (4, 3)))
        axes.annotate(
            "depth of the design", (depth, 0.03), xycoords=("data", "axes fraction"), xytext=(3, 0),
            textcoords="offset points", size=7.5, color=FAINT, rotation=90, va="bottom",
        )  # fmt: skip
    axes.annotate(
        "tokens agree to $10^{-3}$", (0.3, math.log10(AGREEMENT)), xycoords=("axes fraction", "data"), xytext=(0, 3),
        textcoords="offset points", size=7.5, color=FAINT,
    )  # fmt: skip
    axes.set_xlabel("block")
    axes.set_ylabel("log10 of the relative residual")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7.5, loc="best")


def _furthest(curves: Mapping[str, Any], depth: int) -> float:
    """Up to where something is still to be seen."""
    sampled = curves[SAMPLED]
    seen = np.flatnonzero((sampled > DEEPEST_SHOWN).any(axis=0))
    return float(
        max(
            4,
            min(max(int(seen[-1]) + 1, 1), sampled.shape[1]) if len(seen) else 4,
            min(depth + 1, 2 * int(seen[-1]) + 4),
        )
    )


def _map(figure: Figure, axes: Axes, mapped: Mapping[str, Any]) -> None:
    values = np.array([[float(v) for v in row] for row in mapped["log10_relative_residual"]])
    shown = np.clip(values, -8, 0)
    x, y = mapped["x"], mapped["y"]
    image = axes.imshow(shown, origin="lower", aspect="auto", cmap="cividis", vmin=-8, vmax=0, interpolation="nearest")
    if (values > -3).any() and (values <= -3).any() and min(values.shape) > 1:
        axes.contour(shown, levels=[math.log10(AGREEMENT)], colors="#ffffff", linewidths=1.3, linestyles="solid")
    engines = np.array([list(row) for row in mapped["engine"]])
    rows, columns = np.nonzero(engines == SAMPLED)
    if len(rows):
        axes.scatter(columns, rows, s=2.5, color="#ffffff", alpha=0.7, linewidths=0)
    _ticks(axes, "x", x["values"])
    _ticks(axes, "y", y["values"])
    axes.set_xlabel(x["name"].replace("_", " "))
    axes.set_ylabel(y["name"].replace("_", " "))
    kinds = "white line: $10^{-3}$" + ("; dotted cells: sampled, others: mean field" if len(rows) else "; mean field")
    axes.set_title(f"relative residual after the last block ({kinds})", size=8, color=INK, loc="left")
    bar = figure.colorbar(image, ax=axes, extend="min", shrink=0.9)
    bar.set_label("log10", size=8)


def _ticks(axes: Axes, which: str, values: Sequence[Any]) -> None:
    step = max(1, math.ceil(len(values) / 8))
    places = list(range(0, len(values), step))
    labels = [f"{values[p]:.3g}" if isinstance(values[p], float) else str(values[p]) for p in places]
    (axes.set_xticks if which == "x" else axes.set_yticks)(places, labels)
