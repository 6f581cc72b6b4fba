"""What the figures of the reproductions share: type, colours that survive printing in grey, the float floor."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rankscope.views import number
from rankscope.views.figures import drawing_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, FLOOR_GREY = "#222222", "#8a8a8a", "#bdbdbd"
BLACK, VERMILION, BLUE, GREEN, PURPLE, ORANGE, SKY = COLOURS = (
    "#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9",
)  # fmt: skip
MARKERS = "os^DvPX"
Look = dict[str, Any]
"""Keyword arguments of a matplotlib function."""
PANEL_INCHES = (3.15, 2.35)
TYPE = {"font.size": 8.5, "font.family": "DejaVu Sans", "axes.linewidth": 0.7, "hatch.linewidth": 0.5}


@dataclass(frozen=True)
class Style:
    """How one network is drawn; colour, marker and dash each distinguish it."""

    colour: str
    marker: str
    label: str
    dash: str = "-"


def figure_with_head(
    rows: int,
    columns: int,
    title: str,
    subtitle: str,
    *,
    panel: tuple[float, float] = PANEL_INCHES,
    legend_rows: int = 1,
) -> tuple[Figure, list[list[Axes]]]:
    """A grid of panels below a title and an explanation, with room for ``legend_rows`` rows of legend.

    Raises:
        MissingExtraError: without matplotlib.
    """
    width = max(panel[0] * columns, 6.4)
    words = textwrap.wrap(subtitle, int(width * 14))
    head, foot = 0.42 + 0.16 * len(words), 0.16 + 0.18 * legend_rows
    height = panel[1] * rows + head + foot
    with drawing_style("reproduce", TYPE):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height))
        figure.set_layout_engine(
            "constrained", rect=(0, foot / height, 1, 1 - (head + foot) / height), h_pad=0.06, w_pad=0.06
        )
        figure.text(0.012, 1 - 0.09 / height, title, va="top", weight="bold", size=10.5, color=INK)
        figure.text(0.012, 1 - 0.31 / height, "\n".join(words), va="top", size=8.5, color=INK, linespacing=1.25)
        panels = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(row) for row in panels]


def draw_line(
    axes: Axes,
    x: NDArray[np.int64],
    mean: NDArray[np.float64],
    band: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
    style: Style,
    *,
    least: float | None,
) -> None:
    """One line with its band; with ``least`` set (a log axis) smaller values are drawn there."""

    def shown(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values if least is None else np.maximum(values, least)

    if band is not None:
        axes.fill_between(x, shown(band[0]), shown(band[1]), color=style.colour, alpha=0.16, linewidth=0)
    axes.plot(x, shown(mean), color=style.colour, linestyle=style.dash, linewidth=1.4, zorder=3)
    marked = np.arange(x.size) if x.size <= 16 else np.unique(np.geomspace(1, x.size, 10).astype(int)) - 1
    axes.plot(x[marked], shown(mean)[marked], linestyle="none", marker=style.marker, markersize=2.8, color=style.colour)


def draw_printed(axes: Axes, values: NDArray[np.float64], style: Style, *, aside: float) -> None:
    """Published values as hollow marks, moved ``aside`` so that curves that coincide stay visible."""
    known = np.isfinite(values)
    look: Look = {
        "markersize": 4.6,
        "markerfacecolor": "white",
        "markeredgecolor": style.colour,
        "markeredgewidth": 0.9,
    }
    place = np.arange(values.size)[known] + aside
    axes.plot(place, values[known], linestyle="none", marker=style.marker, zorder=4, **look)


def draw_floor(axes: Axes, floor: float, dtype: str) -> None:
    """The zone in which a float format shows only its own rounding."""
    low = axes.get_ylim()[0]
    if floor <= low:
        return
    axes.axhspan(low, floor, facecolor="#f4f4f4", edgecolor=FLOOR_GREY, hatch="////", linewidth=0, zorder=0)
    words, height = f"{dtype} rounding, below {number(floor)}", (low**2 * floor) ** (1 / 3)
    note(axes, 0.985, height, words, va="center", pad=0.8, alpha=0.9)


def note(axes: Axes, x: float, y: float, words: str, *, va: str, pad: float, alpha: float, zorder: float = 3) -> None:
    """A small remark that ends at ``x`` (a share of the width of the panel) and keeps clear of the lines behind it."""
    box: Look = {"facecolor": "white", "edgecolor": "none", "pad": pad, "alpha": alpha}
    look: Look = {"transform": axes.get_yaxis_transform(), "ha": "right", "size": 6.8, "color": "#444444"}
    axes.text(x, y, words, va=va, zorder=zorder, bbox=box, **look)


def settle_axes(axes: Axes, deepest: int) -> None:
    """Whole blocks on the x axis, light grid, no box."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(-0.3, deepest + 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    plain_axes(axes)


def settle_log_axes(axes: Axes, deepest: int) -> None:
    """The same where depth is drawn on a log scale, from the first block on."""
    axes.set_xscale("log")
    axes.set_xlim(0.93, deepest * 1.08)
    ticks = [tick for tick in (1, 2, 4, 8, 12, 32, 128) if tick <= deepest]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    plain_axes(axes)


def plain_axes(axes: Axes) -> None:
    """Light grid, no box."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8)


def legend_below(figure: Figure, styles: Sequence[Style], *, printed: str | None = None, rows: int = 1) -> None:
    """One legend for all panels, in so many rows."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=style.colour, marker=style.marker, markersize=4, linestyle=style.dash, label=style.label)
        for style in styles
    ]
    if printed is not None:
        hollow = Line2D([], [], linestyle="none", marker="o", markersize=4.6, label=printed)
        hollow.set(markerfacecolor="white", markeredgecolor=INK, markeredgewidth=0.9)
        handles.append(hollow)
    columns = -(-len(handles) // rows)
    look: Look = {"frameon": False, "fontsize": 8, "labelcolor": INK, "columnspacing": 1.4, "handletextpad": 0.5}
    figure.legend(handles=handles, loc="lower center", ncols=columns, **look)
