"""Charts in matplotlib: one style, one header, one way to draw a line, a floor and a legend.

:func:`draw` turns a :class:`~rankscope.views.charts.Plot` into a figure. Other figures start with :func:`headed_figure`
and draw into its axes with the other functions. pyplot is never imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import MissingExtraError
from rankscope.views.charts import BEFORE, BarChart, Guide, HeatMap, Line, LineChart, Note, Panel, Plot, Style
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
    """The figure of a plot; a notebook displays it automatically.

    Raises:
        MissingExtraError: without matplotlib.
    """
    rows = max(1, math.ceil(len(plot.panels) / plot.columns))
    lines = plot.panels[0].lines if plot.shared_legend and isinstance(plot.panels[0], LineChart) else ()
    named = [0.0] * plot.columns
    for place, panel in enumerate(plot.panels):
        if not lines:
            named[place % plot.columns] = max(named[place % plot.columns], _legend_inches(panel))
    with drawing_style(asked_by):
        figure, grid = headed_figure(
            plot.title,
            plot.subtitle,
            rows=rows,
            columns=plot.columns,
            panel_size=plot.panel_size,
            widths=plot.widths,
            legend_rows=math.ceil(len(lines) / 2),
            legend_inches=sum(named),
            asked_by=asked_by,
        )
        places = [axes for row in grid for axes in row]
        for place, (axes, panel) in enumerate(zip(places, plot.panels, strict=False)):
            draw_panel(axes, panel, legend=not lines)
            below = place + plot.columns
            if below < len(plot.panels) and plot.panels[below].x_label == panel.x_label:
                axes.set_xlabel("")
        for axes in places[len(plot.panels) :]:
            axes.remove()
        if lines:
            legend_below(figure, _styled(lines), rows=math.ceil(len(lines) / 2))
    return for_notebooks(figure)


def headed_figure(
    title: str,
    subtitle: str,
    *,
    rows: int,
    columns: int,
    panel_size: tuple[float, float] = (3.5, 2.45),
    widths: Sequence[float] = (),
    legend_rows: int = 0,
    legend_inches: float = 0.0,
    asked_by: str = "Run.plot",
) -> tuple[Figure, list[list[Axes]]]:
    """A grid of empty panels under a title and a sentence.

    Args:
        title: first line, in bold.
        subtitle: the sentence below it; may be empty.
        rows: of panels.
        columns: of panels.
        panel_size: width and height of a panel in inches.
        widths: relative widths of the columns.
        legend_rows: rows to reserve for a legend below all panels.
        legend_inches: width to add for legends at the right of panels.
        asked_by: what the reader called, for the message.

    Raises:
        MissingExtraError: without matplotlib.
    """
    with drawing_style(asked_by):
        from matplotlib.figure import Figure

        width = max(panel_size[0] * columns + legend_inches, NARROWEST_INCHES)
        # Hinting makes drawn letters up to 4% wider than their outlines.
        bold = wrapped(title, width * 0.93, 9.5, "bold")
        plain = [line for part in subtitle.split("\n") for line in wrapped(part, width * 0.93, 8.5)]
        below = 0.14 + 0.18 * len(bold)
        head = below + 0.17 * len(plain) + 0.12
        foot = 0.12 + 0.18 * legend_rows if legend_rows else 0.0
        height = panel_size[1] * rows + head + foot
        figure = Figure(figsize=(width, height))
        figure.set_layout_engine(
            "constrained", rect=(0, foot / height, 1, 1 - (head + foot) / height), hspace=0.06, wspace=0.04
        )
        figure.text(0.012, 1 - 0.1 / height, "\n".join(bold), va="top", weight="bold", size=9.5, color=INK)
        figure.text(0.012, 1 - below / height, "\n".join(plain), va="top", size=8.5, color=INK, linespacing=1.35)
        grid = figure.subplots(rows, columns, squeeze=False, width_ratios=list(widths) or None)
    return figure, [list(row) for row in grid]


def wrapped(text: str, inches: float, size: float, weight: str = "normal") -> list[str]:
    """Lines of ``text`` that are at most ``inches`` wide, by the outlines of its letters; a longer word is broken."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=TYPE["font.family"], size=size, weight=weight)

    def fits(words: str) -> bool:
        is_math = words.count("$") > 1
        return bool(text_to_path.get_text_width_height_descent(words, font, ismath=is_math)[0] <= 72 * inches)

    lines: list[str] = []
    for word in text.split():
        if lines and fits(f"{lines[-1]} {word}"):
            lines[-1] += f" {word}"
            continue
        while len(word) > 1 and not fits(word):
            end = next(end for end in range(len(word) - 1, 0, -1) if end == 1 or fits(word[:end]))
            lines.append(word[:end])
            word = word[end:]
        lines.append(word)
    return lines


def _legend_inches(panel: Panel) -> float:
    """Width of the legend at the right of a panel; 0 if it has none."""
    if not isinstance(panel, LineChart) or panel.names != "legend":
        return 0.0
    names = [panel.legend_title, *(line.name for line in panel.lines), *(guide.label for guide in _beside(panel))]
    return 0.45 + 0.058 * max(map(len, names)) if any(names) else 0.0


def _beside(panel: LineChart) -> list[Guide]:
    """Guides that are named in the legend, not in the panel: vertical lines."""
    return [guide for guide in panel.guides if guide.axis == "x" and guide.kind == "level"]


def for_notebooks(figure: Figure) -> Figure:
    """The same figure, displayed automatically by a notebook whether or not pyplot was imported."""
    from rankscope.views._notebook_figure import NotebookFigure

    figure.__class__ = NotebookFigure
    return figure


def draw_panel(axes: Axes, panel: Panel, *, legend: bool = True) -> None:
    """Draw one panel into its axes."""
    if isinstance(panel, LineChart):
        _draw_lines(axes, panel, legend=legend)
    elif isinstance(panel, BarChart):
        _draw_bars(axes, panel)
    else:
        _draw_map(axes, panel)


def _draw_lines(axes: Axes, chart: LineChart, *, legend: bool) -> None:
    title_axes(axes, chart.title, chart.aside)
    plain_axes(axes)
    lines = _styled(chart.lines)
    if not any(np.isfinite(_floats(line.y)).any() for line in lines):
        axes.text(0.5, 0.5, chart.empty, transform=axes.transAxes, ha="center", va="center", color=FAINT)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        return
    if chart.log:
        axes.set_yscale("log")
    for line in lines:
        draw_line(axes, line)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    _x_axis(axes, chart)
    if chart.y_range is not None:
        axes.set_ylim(*chart.y_range)
    for guide in chart.guides:
        _draw_guide(axes, guide)
    for note in chart.notes:
        _draw_note(axes, note)
    if chart.names == "ends" and len(lines) > 1:
        _name_ends(axes, lines)
    elif legend and _legend_inches(chart):
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


def draw_line(axes: Axes, line: Line) -> None:
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
        (draw_floor if guide.axis == "y" else _draw_floor_from)(axes, guide.value, guide.label)
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
        end = _quiet_end(axes, guide.value)
        axes.annotate(
            guide.label, (end, guide.value), xycoords=axes.get_yaxis_transform(),
            xytext=(0, 2.5), textcoords="offset points", va="bottom", size=7.5, color=FAINT,
            ha="left" if end < 0.5 else "right",
        )  # fmt: skip
    elif guide.kind == "level":
        label = guide.label or "_unnamed"
        axes.axvline(guide.value, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1, label=label)


def _quiet_end(axes: Axes, value: float) -> float:
    """Where to write the name of a level: at the end of the axis at which lines are further from it, left if equal."""
    span = axes.transData + axes.transAxes.inverted()
    height = span.transform((axes.get_xlim()[0], value))[1]
    nearest = {0.01: np.inf, 0.99: np.inf}
    for line in axes.get_lines():
        points = span.transform(np.column_stack([_floats(line.get_xdata()), _floats(line.get_ydata())]))
        for end, near in nearest.items():
            here = points[np.abs(points[:, 0] - end) < 0.3, 1]
            away = np.abs(here[np.isfinite(here)] - height - 0.03)
            nearest[end] = min(near, float(away.min(initial=np.inf)))
    return max(nearest, key=lambda end: nearest[end])


def draw_floor(axes: Axes, floor: float, label: str) -> None:
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


def _draw_note(axes: Axes, note: Note) -> None:
    axes.annotate(
        note.text, (note.x, note.y), xytext=(-8, 4), textcoords="offset points", ha="right", size=7.5, color=SOFT
    )


def _name_ends(axes: Axes, lines: Sequence[Line]) -> None:
    """Write each line's name at its end, moved apart if they would overlap."""
    ends = []
    for line in lines:
        x, y = _floats(line.x), _floats(line.y)
        known = np.flatnonzero(np.isfinite(y))
        if known.size and line.style is not None:
            ends.append((float(y[known[-1]]), float(x[known[-1]]), line.name, line.style.colour))
    low, high = axes.get_ylim()
    position = np.log if axes.get_yscale() == "log" else (lambda value: value)
    scale = float(position(high) - position(low)) or 1.0
    # From the bottom up, each name at least a tenth of the height above the previous one.
    taken = -math.inf
    for value, x_end, name, colour in sorted(ends):
        height = float(position(value) - position(low)) / scale
        taken = max(height, taken + 0.1)
        axes.annotate(
            name,
            xy=(x_end, value),
            xytext=(1.01, min(taken, 1.0)),
            textcoords=axes.transAxes,
            va="center",
            size=7.5,
            weight="bold",
            color=colour,
            annotation_clip=False,
        )


def legend_below(figure: Figure, lines: Sequence[Line], *, rows: int = 1) -> None:
    """Draw one legend for all panels, in the given number of rows; :func:`headed_figure` reserves the space."""
    from matplotlib.lines import Line2D

    handles = []
    for line in lines:
        style = line.style or Style(SERIES[0])
        handle = Line2D([], [], color=style.colour, marker=style.marker, markersize=4, linestyle=style.dash)
        handle.set_label(line.name)
        handles.append(handle)
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=-(-len(handles) // rows),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        columnspacing=1.4,
        handletextpad=0.5,
    )


def title_axes(axes: Axes, title: str, aside: str = "") -> None:
    """Put a bold title on the left and small text on the right."""
    axes.set_title(title, loc="left", size=9, weight="bold", color=INK, pad=5)
    if aside:
        axes.set_title(aside, loc="right", size=7.5, color=FAINT, pad=5)


def plain_axes(axes: Axes) -> None:
    """A light grid and no box."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3, width=0.7, colors=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.xaxis.label.set_color(INK)


def _draw_bars(axes: Axes, chart: BarChart) -> None:
    title_axes(axes, chart.title)
    plain_axes(axes)
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


def _draw_map(axes: Axes, chart: HeatMap) -> None:
    title_axes(axes, chart.title)
    least, most = chart.limits
    values = np.asarray(chart.values, dtype=np.float64)
    shown = np.clip(values, least, most)
    image = axes.imshow(
        shown, origin="lower", aspect="auto", cmap="cividis", vmin=least, vmax=most, interpolation="nearest"
    )
    apart = chart.contour is not None and (values > chart.contour).any() and (values <= chart.contour).any()
    if chart.contour is not None and apart and min(values.shape) > 1:
        axes.contour(shown, levels=[chart.contour], colors="#ffffff", linewidths=1.3, linestyles="solid")
    if chart.dotted is not None:
        rows, columns = np.nonzero(np.asarray(chart.dotted))
        axes.scatter(columns, rows, s=2.5, color="#ffffff", alpha=0.7, linewidths=0)
    for put, ticks in ((axes.set_xticks, chart.x_ticks), (axes.set_yticks, chart.y_ticks)):
        places = list(range(0, len(ticks), max(1, math.ceil(len(ticks) / 8))))
        put(places, [ticks[place] for place in places])
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    figure = axes.get_figure(root=True)
    if figure is not None:
        bar = figure.colorbar(image, ax=axes, extend="min", shrink=0.9)
        bar.set_label(chart.bar_label, size=8)


def _floats(values: Any) -> NDArray[np.float64]:
    """Numbers to draw; infinite values, such as the logarithm of zero, become missing."""
    array = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(array), array, np.nan)
