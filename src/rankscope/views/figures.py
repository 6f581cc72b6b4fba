"""Charts in matplotlib: one style, one header, one way to draw a line, a floor and a legend.

:func:`draw` turns a :class:`~rankscope.views.charts.Plot` into a figure. pyplot is never imported.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import MissingExtraError
from rankscope.views.charts import BEFORE, BarChart, Guide, Line, LineChart, Panel, Plot, Style
from rankscope.views.palette import FAINT, FLOOR_ZONE, GRID, INK, MARKERS, OTHERS, SERIES, SOFT
from rankscope.views.tables import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TYPE: Mapping[str, Any] = {
    "font.size": 8.5,
    "font.family": "DejaVu Sans",
    "axes.linewidth": 0.7,
    "hatch.linewidth": 0.5,
}
NARROWEST_INCHES = 5.2
MARKED_POINTS = 40
"""Lines with more points are drawn without markers."""

DASHES = ("-", (0, (5, 1.5)), "-.", (0, (1, 1)))
_ON_ZONE: Mapping[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}


@contextmanager
def drawing_style(asked_by: str, settings: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Context with matplotlib's defaults and ``settings``, for drawing and saving.

    A file ``matplotlibrc`` in the current folder changes the defaults, and one of its settings runs LaTeX. So the
    defaults are restored here.

    Args:
        asked_by: what the reader called, for the message.
        settings: override the defaults; if None, the fonts and line widths of our figures.

    Raises:
        MissingExtraError: without matplotlib.
    """
    try:
        import matplotlib.figure  # noqa: F401  (what is drawn inside needs it)
        from matplotlib.style import context
    except ImportError as error:
        raise MissingExtraError(asked_by, "matplotlib", "plot") from error
    with context(["default", dict(TYPE if settings is None else settings)]):
        yield


def draw(plot: Plot, asked_by: str = "Run.plot") -> Figure:
    """The figure of a plot: a grid of panels under a title and a sentence; a notebook displays it automatically.

    Raises:
        MissingExtraError: without matplotlib.
    """
    rows = max(1, math.ceil(len(plot.panels) / plot.columns))
    named = [0.0] * plot.columns
    for place, panel in enumerate(plot.panels):
        named[place % plot.columns] = max(named[place % plot.columns], _legend_inches(panel))
    with drawing_style(asked_by):
        from rankscope.views._notebook_figure import NotebookFigure

        # The header, in lines that fit the width, and the height that it takes.
        width = max(plot.panel_size[0] * plot.columns + sum(named), NARROWEST_INCHES)
        first, dot, others = plot.finding.partition(". ")
        bold = _wrapped(first + dot.strip(), width, 9.5, 0.69)
        plain = [line for part in others.split("\n") for line in _wrapped(part, width, 8.5, 0.6)]
        small = _wrapped(plot.settings, width, 7.0, 0.6)
        below = 0.14 + 0.18 * len(bold)
        lower = below + 0.17 * len(plain)
        head = lower + 0.14 * len(small) + 0.12
        height = plot.panel_size[1] * rows + head
        figure = NotebookFigure(figsize=(width, height))
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head / height), hspace=0.06, wspace=0.04)
        figure.text(0.012, 1 - 0.1 / height, "\n".join(bold), va="top", weight="bold", size=9.5, color=INK)
        figure.text(0.012, 1 - below / height, "\n".join(plain), va="top", size=8.5, color=INK, linespacing=1.35)
        figure.text(0.012, 1 - lower / height, "\n".join(small), va="top", size=7, color=FAINT, linespacing=1.35)
        grid = figure.subplots(rows, plot.columns, squeeze=False, width_ratios=list(plot.widths) or None)
        places = [axes for row in grid for axes in row]
        for place, (axes, panel) in enumerate(zip(places, plot.panels, strict=False)):
            draw_panel(axes, panel)
            next_row = place + plot.columns
            if next_row < len(plot.panels) and plot.panels[next_row].x_label == panel.x_label:
                axes.set_xlabel("")
        for axes in places[len(plot.panels) :]:
            axes.remove()
    return figure


def _wrapped(text: str, inches: float, size: float, em: float) -> list[str]:
    """Lines of ``text`` that fit, if a letter is on average ``em`` times the size of the font wide."""
    return textwrap.wrap(text, int(72 * inches / (em * size)), break_on_hyphens=False)


def _legend_inches(panel: Panel) -> float:
    """Width of the legend at the right of a panel; 0 if it has none."""
    if not isinstance(panel, LineChart) or panel.names != "legend":
        return 0.0
    names = [
        panel.legend_title,
        *(line.name for line in panel.lines),
        *(guide.label for guide in _vertical_guides(panel)),
    ]
    return 0.45 + 0.058 * max(map(len, names)) if any(names) else 0.0


def _vertical_guides(panel: LineChart) -> list[Guide]:
    """Guides that are named in the legend, not in the panel: vertical lines."""
    return [guide for guide in panel.guides if guide.axis == "x" and guide.kind == "level"]


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw one panel into its axes."""
    if isinstance(panel, LineChart):
        _draw_lines(axes, panel)
    else:
        _draw_bars(axes, panel)


def _draw_lines(axes: Axes, chart: LineChart) -> None:
    _title_axes(axes, chart.title, chart.subtitle)
    _plain_axes(axes)
    lines = _styled(chart.lines)
    if not any(np.isfinite(_floats(line.y)).any() for line in lines):
        axes.text(0.5, 0.5, chart.empty, transform=axes.transAxes, ha="center", va="center", color=FAINT)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        return
    if chart.log:
        axes.set_yscale("log")
    for place, line in enumerate(lines):
        if chart.bars:
            _draw_columns(axes, line, 0.8 / len(lines), place - (len(lines) - 1) / 2)
        else:
            _draw_line(axes, line)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    _x_axis(axes, chart)
    if chart.y_range is not None:
        axes.set_ylim(*chart.y_range)
    for guide in chart.guides:
        _draw_guide(axes, guide)
    for note in chart.notes:
        axes.annotate(
            note.text, (note.x, note.y), xytext=(-8, 4), textcoords="offset points", ha="right", size=7.5, color=SOFT
        )
    if _legend_inches(chart):
        # Outside: a legend inside the axes covers a line sooner or later.
        axes.legend(
            frameon=False, fontsize=7.5, labelcolor=INK, loc="upper left", bbox_to_anchor=(1.0, 1.0),
            title=chart.legend_title or None, title_fontsize=7, alignment="left", borderaxespad=0.2,
        )  # fmt: skip


def _styled(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Each line with its style, or the next one of the palette."""
    return tuple(
        line
        if line.style is not None
        else replace(
            line,
            style=Style(
                SERIES[place % len(SERIES)],
                MARKERS[place % len(MARKERS)],
                DASHES[min(place, 1 + place // len(SERIES)) % len(DASHES)],
            ),
        )
        for place, line in enumerate(lines)
    )


def _draw_line(axes: Axes, line: Line) -> None:
    """Draw one line with its band; points at the float floor are hollow."""
    style = line.style or Style(SERIES[0], MARKERS[0])
    x, y = _floats(line.x), _floats(line.y)
    if line.low is not None and line.high is not None:
        low, high = _floats(line.low), _floats(line.high)
        axes.fill_between(x, low, high, color=style.colour, alpha=0.16, linewidth=0, zorder=2)
        if x.size == 1:
            axes.vlines(x, low, high, color=style.colour, alpha=0.35, linewidth=4, zorder=2)
    marker = style.marker if x.size <= MARKED_POINTS else ""
    marked: dict[str, Any] = {"color": style.colour, "marker": marker, "markersize": 2 + 1.2 * style.width}
    axes.plot(x, y, linestyle=style.dash, linewidth=style.width, zorder=3, label=line.name or "_unnamed", **marked)
    if marker and line.floor is not None and (hollow := np.asarray(line.floor, np.bool_)).any():
        axes.plot(x[hollow], y[hollow], linestyle="none", markerfacecolor="white", zorder=4, label="_floor", **marked)


def _draw_columns(axes: Axes, line: Line, width: float, shift: float) -> None:
    """Draw a line as bars, with its band as a stroke on each."""
    y, colour = _floats(line.y), (line.style or Style(SERIES[0])).colour
    ends = None if line.low is None or line.high is None else np.abs([y - _floats(line.low), _floats(line.high) - y])
    x = _floats(line.x) + shift * width
    axes.bar(x, y, width, yerr=ends, color=colour, ecolor=INK, label=line.name or "_unnamed", zorder=3)


def _x_axis(axes: Axes, chart: LineChart) -> None:
    from matplotlib.ticker import MaxNLocator

    whole = MaxNLocator(nbins=7, integer=True, min_n_ticks=1)
    if chart.log_x:
        axes.set_xscale("symlog", linthresh=10, linscale=0.6)
    else:
        axes.xaxis.set_major_locator(whole)
    every = np.concatenate([_floats(line.x) for line in chart.lines])
    first, last = (float(every.min()), float(every.max())) if chart.x_range is None else chart.x_range
    pad = max(0.5, 0.03 * (last - first)) if chart.x_range is None else 0.0
    axes.set_xlim(first - pad, last + pad)
    if chart.x_label == "block" and first == BEFORE:
        room = (last - first) / 20
        blocks = [tick for tick in whole.tick_values(0, last) if BEFORE + room < tick <= last]
        axes.set_xticks([BEFORE, *blocks], ["in", *(f"{block:.0f}" for block in blocks)])


def _draw_guide(axes: Axes, guide: Guide) -> None:
    if guide.kind == "floor":
        (_draw_floor_below if guide.axis == "y" else _draw_floor_from)(axes, guide.value, guide.label)
    elif guide.kind == "null":
        low, high = axes.get_ylim()
        log = axes.get_yscale() == "log"
        if log and guide.value <= 0:
            return
        room = guide.value * 2.5 if log else guide.value + 0.13 * (max(high, guide.value) - low)
        axes.set_ylim(min(low, guide.value), max(high, room))
        axes.axhline(guide.value, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=2.5)
        axes.annotate(
            guide.label, (0.985, guide.value), xycoords=axes.get_yaxis_transform(), xytext=(0, 2.5),
            textcoords="offset points", ha="right", va="bottom", size=7, color=SOFT, bbox=dict(_ON_ZONE), zorder=5,
        )  # fmt: skip
    elif guide.kind == "level" and guide.axis == "y":
        axes.axhline(guide.value, color=FAINT, linewidth=0.8, zorder=1)
        axes.annotate(
            guide.label, (0.01, guide.value), xycoords=axes.get_yaxis_transform(), xytext=(0, 2.5),
            textcoords="offset points", va="bottom", size=7.5, color=FAINT, ha="left",
        )  # fmt: skip
    elif guide.kind == "level":
        label = guide.label or "_unnamed"
        axes.axvline(guide.value, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1, label=label)


def _draw_floor_below(axes: Axes, floor: float, label: str) -> None:
    """Hatch the zone of a logarithmic axis in which a float format shows only rounding, unless it is far away."""
    low, high = axes.get_ylim()
    if axes.get_yscale() != "log" or low > 30 * floor:
        return
    low = min(low, floor / 10)
    axes.set_ylim(low, high)
    axes.axhspan(low, floor, facecolor=FLOOR_ZONE, edgecolor=OTHERS, hatch="////", linewidth=0, zorder=0)
    axes.annotate(
        label, (0.015, floor), xycoords=axes.get_yaxis_transform(), xytext=(0, -2.5), textcoords="offset points",
        va="top", size=7, color=SOFT, bbox=dict(_ON_ZONE), zorder=2.5,
    )  # fmt: skip


def _draw_floor_from(axes: Axes, start: float, label: str) -> None:
    end = axes.get_xlim()[1]
    axes.axvspan(start, end, color=FLOOR_ZONE, linewidth=0, zorder=0)
    axes.set_xlim(axes.get_xlim()[0], end)
    axes.text(start, 0.5, f" {label}", transform=axes.get_xaxis_transform(), color=SOFT, size=8)


def floor_words(dtype: object, floor: float) -> str:
    """Label for the float floor of a format."""
    return f"{dtype} cannot see below {number(floor)}"


def _title_axes(axes: Axes, title: str, subtitle: str = "") -> None:
    """Put a bold title on the left and small text on the right."""
    axes.set_title(title, loc="left", size=9, weight="bold", color=INK, pad=5)
    if subtitle:
        axes.set_title(subtitle, loc="right", size=7.5, color=FAINT, pad=5)


def _plain_axes(axes: Axes) -> None:
    """A light grid and no box."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3, width=0.7, colors=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.xaxis.label.set_color(INK)


def _draw_bars(axes: Axes, chart: BarChart) -> None:
    _title_axes(axes, chart.title)
    _plain_axes(axes)
    axes.grid(visible=False)
    known = [value for value in chart.values if value is not None and math.isfinite(value) and value > 0]
    bottom, most = min(known, default=1.0) / 3, max(known, default=1.0)
    for place, (value, style) in enumerate(zip(chart.values, chart.styles, strict=True)):
        if value is None or not math.isfinite(value) or value <= 0:
            axes.text(bottom, place, f" {chart.missing}", va="center", size=7, color=INK)
            continue
        axes.barh(place, value - bottom, left=bottom, height=0.72, color=style.colour)
        axes.text(value, place, f" {number(value)}", va="center", size=7, color=INK)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter("")  # the bars have value labels, and minor tick labels would overlap
    axes.set_xlim(bottom, most * (12 if most / bottom > 1e3 else 2.5))
    count = len(chart.values)
    axes.set_xlabel(chart.x_label)
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_yticks(range(count), list(chart.names) if chart.names else [""] * count)


def _floats(values: Any) -> NDArray[np.float64]:
    """Numbers to draw; infinite values, such as the logarithm of zero, become missing."""
    array = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(array), array, np.nan)
