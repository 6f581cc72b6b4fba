"""A comparison of remedies as a figure: residual over depth, and gradients of queries and keys beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.runs.figure import FAINT, FLOOR_GREY, INK
from rankscope.runs.remedy_ranking import NONE
from rankscope.runs.sheet import sheet
from rankscope.runs.text import facts_line, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw_remedies(run: Run) -> Figure:
    """Curves of the relative residual, then bars of where each remedy ends and of the gradient ratio.

    Raises:
        MissingExtraError: without matplotlib.
    """
    entries = run.extra["remedies"]
    width = 11.5
    words = textwrap.wrap(run.verdict, int(width * 14))
    head = 0.42 + 0.17 * len(words)
    height = max(3.6, 0.26 * len(entries) + 1.1) + head
    with sheet("Run.plot", width, height) as figure:
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head / height))
        figure.text(0.012, 1 - 0.1 / height, facts_line(run), va="top", weight="bold", size=9.5, color=INK)
        figure.text(0.012, 1 - 0.32 / height, "\n".join(words), va="top", size=8.5, color=INK, linespacing=1.3)
        ratios = [entry["qk_over_v"] for entry in entries]
        has_ratios = any(ratio is not None for ratio in ratios)
        panels = figure.subplots(1, 3 if has_ratios else 2, width_ratios=(1.35, 1, 0.8) if has_ratios else (1.35, 1))
        _draw_curves(panels[0], entries, run.floor.get("relative"), str(run.floor.get("dtype")))
        _draw_bars(panels[1], entries, [entry["residual_last"] for entry in entries], "relative residual, last block")
        if has_ratios:
            _draw_bars(panels[2], entries, ratios, "gradient of Q, K weights over V", names=False)
    return figure


def _styles(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A colour for the best few; the rest in grey."""
    others = [str(entry["name"]) for entry in entries if entry["name"] != NONE]
    return {NONE: "#000000"} | dict(zip(others, COLOURS, strict=False))


def _draw_curves(axes: Axes, entries: Sequence[Mapping[str, Any]], floor: float | None, dtype: str) -> None:
    styles = _styles(entries)
    axes.set_yscale("log")
    for entry in reversed(entries):
        name = str(entry["name"])
        values = np.array([np.nan if value is None else value for value in entry["residual"]])
        values[values <= 0] = np.nan
        named = name in styles
        axes.plot(
            np.arange(values.size), values,
            color=styles.get(name, "#bdbdbd"), linewidth=2.6 if name == NONE else 1.6 if named else 1.0,
            linestyle="--" if name == NONE else "-", label=name if named else None, zorder=3 if named else 1,
        )  # fmt: skip
    low, high = axes.get_ylim()
    if floor is not None and low < 30 * floor:
        low = min(low, floor / 10)
        axes.axhspan(low, floor, facecolor="#f2f2f2", edgecolor=FLOOR_GREY, hatch="////", linewidth=0, zorder=0)
        axes.text(0.02, floor, f"{dtype} cannot see below {number(floor)}", transform=axes.get_yaxis_transform(),
                  va="top", size=7, color="#444444",
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85})  # fmt: skip
    axes.set_ylim(low, max(high, 1.3))
    axes.set_xlabel("blocks passed")
    axes.set_ylabel("relative residual")
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    lines, labels = axes.get_legend_handles_labels()
    axes.legend(lines[::-1], labels[::-1], frameon=False, fontsize=7.5, labelcolor=INK, loc="best",
                title="others in grey", title_fontsize=7)  # fmt: skip
    _plain(axes)


def _draw_bars(
    axes: Axes, entries: Sequence[Mapping[str, Any]], values: Sequence[float | None], title: str, *, names: bool = True
) -> None:
    styles = _styles(entries)
    known = [value for value in values if value is not None and np.isfinite(value) and value > 0]
    bottom = min(known, default=1.0) / 3
    positions = list(range(len(entries)))
    for position, entry, value in zip(positions, entries, values, strict=True):
        shown = value is not None and np.isfinite(value) and value > 0
        if value is not None and shown:
            axes.barh(
                position, value - bottom, left=bottom, height=0.72, color=styles.get(str(entry["name"]), "#c9c9c9")
            )
        words = number(float(value)) if value is not None and shown else "no ratio" if not names else "undefined"
        axes.text(
            value if value is not None and shown else bottom, position, f" {words}", va="center", size=7, color=INK
        )
    axes.set_xscale("log")
    axes.set_xlim(bottom, max(known, default=1.0) * (12 if max(known, default=1.0) / bottom > 1e3 else 2.5))
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.set_yticks(positions, [str(entry["name"]) for entry in entries] if names else [""] * len(entries))
    axes.set_title(title, size=8.5)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK)
    axes.xaxis.label.set_color(FAINT)
