"""The table drawn: one line per mechanism, where it ends with its skips and without them, coloured by its order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankscope.papers._drawing import INK, TYPE, plain_axes
from rankscope.papers.mechanisms.summing import AS_IT_IS, End, Line, lines_of
from rankscope.papers.mechanisms.wording import FATES
from rankscope.views.figures import drawing_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

COLOURS = {3: "#B2182B", 1: "#0072B2", 0: "#009E73", None: "#777777"}
MARKERS = {3: "v", 1: "o", 0: "D", None: "o"}
WORDS = {
    3: "order 3: cubes distances between tokens",
    1: "order 1: multiplies them",
    0: "order 0: makes equal tokens unequal",
    None: "no order: skips not all cut, or no tokens left",
}
LEAST = -19.0
TICKS = {0.0: "1", -0.046: "0.9", -0.301: "0.5", -1.0: "0.1", -3.0: "$10^{-3}$", -6.0: "$10^{-6}$", -12.0: "$10^{-12}$"}
LINE_INCHES = 0.2


def draw_table(run: Run) -> dict[str, Figure]:
    """``figure``: every mechanism, ranked by what is left without skips, within its order."""
    lines = [line for line in lines_of(run) if line.change == AS_IT_IS]
    lines.sort(key=_rank)
    size = run.extra["size"]
    height = LINE_INCHES * len(lines) + 1.9
    with drawing_style("reproduce", TYPE):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.6, height))
        axes = figure.add_axes((0.225, 0.78 / height, 0.745, 1 - 1.75 / height))
        _draw(axes, lines)
        title = f"What is left after {size['depth']} blocks, with skips and without"
        figure.text(0.012, 1 - 0.1 / height, title, va="top", weight="bold", size=10.5, color=INK)
        words = (
            f"Relative residual of the tokens (1: nothing in common, 0: equal). Width {size['width']}, "
            f"{size['tokens']} tokens,\nrandom initialisation, median of {size['seeds']} "
            f"{'seed' if size['seeds'] == 1 else 'seeds'}. "
            "Hollow: whole model. Filled: every skip cut, MLPs and norms kept.\n"
            "The axis is stretched toward 1."
        )
        figure.text(0.012, 1 - 0.33 / height, words, va="top", size=8.5, color=INK, linespacing=1.25)
        _legend(figure, {line.order.get("cut") for line in lines})
    return {"figure": figure}


def _rank(line: Line) -> tuple[int, float]:
    order = line.order.get("cut")
    end = line.ends.get("cut")
    left = end.log10 if end is not None and end.log10 is not None else 1.0
    return (-1 if order is None else order, -left)


def at(log10: float) -> float:
    """Place on the axis: minus the root of the number of digits in which tokens agree, wide near 1."""
    return -math.sqrt(max(0.0, -log10))


def _draw(axes: Axes, lines: Sequence[Line]) -> None:
    for place, line in enumerate(lines):
        order = line.order.get("cut")
        colour, marker = COLOURS[order], MARKERS[order]
        full, cut = line.ends["full"], line.ends.get("cut")
        if full.log10 is not None:
            axes.plot(at(full.log10), place, marker, mfc="white", mec=colour, mew=1.0, ms=4.6, zorder=3)
        if cut is not None and cut.log10 is not None:
            shown = at(max(cut.log10, LEAST))
            if full.log10 is not None:
                axes.plot([at(full.log10), shown], [place, place], color=colour, linewidth=0.8, alpha=0.45, zorder=1)
            axes.plot(shown, place, marker, color=colour, ms=4.6, zorder=4)
            _label(axes, cut, shown, place)
    axes.set_yticks(range(len(lines)), [line.mechanism.model for line in lines])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlim(at(LEAST) - 0.12, 0.12)
    axes.set_xticks([at(tick) for tick in TICKS], list(TICKS.values()))
    axes.axvline(at(-15.05), color="#777777", linewidth=0.7, linestyle=(0, (1, 1.5)), zorder=0)
    axes.text(at(-15.05), -0.75, "float64 rounding", size=6.8, color="#444444", ha="center", va="bottom")
    plain_axes(axes)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.6)


def _label(axes: Axes, end: End, shown: float, place: int) -> None:
    """The value itself where it lies beyond the axis, and what became of tokens that did not last."""
    words = []
    if end.log10 is not None and end.log10 < LEAST:
        words.append(f"$10^{{{end.log10:.0f}}}$")
    if end.lost_after is not None:
        words.append(f"at block {end.lost_after}, then {FATES[end.fate or 'equal']}")
    if words:
        side, aside = ("left", 0.08) if shown < at(-1.0) else ("right", -0.5)
        place_at = (shown + aside, place - 0.06)
        axes.text(*place_at, ", ".join(words), ha=side, size=7.2, color=INK, va="center", zorder=5, bbox=_BACK)


_BACK = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.9}


def _legend(figure: Figure, orders: set[int | None]) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for order, words in WORDS.items():
        if order in orders:
            handle = Line2D(
                [], [], linestyle="none", marker=MARKERS[order], color=COLOURS[order], markersize=5, label=words
            )
            handle.set_markerfacecolor(COLOURS[order] if order is not None else "white")
            handles.append(handle)
    columns = 2 if len(handles) > 2 else len(handles)
    figure.legend(handles=handles, loc="lower center", ncols=columns, frameon=False, fontsize=8, labelcolor=INK)
