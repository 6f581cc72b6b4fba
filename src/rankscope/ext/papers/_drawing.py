"""Figures of the reproductions: panels of charts below a header, with one legend for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.ext.papers._curves import DepthLine
from rankscope.views import Line, LineChart, Style
from rankscope.views.figures import draw_panel, headed_figure, legend_below
from rankscope.views.palette import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (BLACK, VERMILION, BLUE, GREEN, PURPLE, ORANGE, SKY)
PANEL_INCHES = (3.15, 2.35)
Look = dict[str, Any]
"""Keyword arguments of a matplotlib function."""


def drawn(
    title: str,
    subtitle: str,
    panels: Sequence[Sequence[LineChart]],
    *,
    styles: Mapping[str, Style] | None = None,
    panel_size: tuple[float, float] = PANEL_INCHES,
    legend_rows: int = 1,
) -> Figure:
    """Rows of charts below a header, and a legend of ``styles`` in the given number of rows below them.

    Raises:
        MissingExtraError: without matplotlib.
    """
    shape: Look = {"rows": len(panels), "columns": max(map(len, panels)), "legend_rows": legend_rows if styles else 0}
    figure, grid = headed_figure(title, subtitle, panel_size=panel_size, asked_by="reproduce", **shape)
    for number, charts in enumerate(panels):
        below = panels[number + 1] if number + 1 < len(panels) else ()
        for column, (axes, chart) in enumerate(zip(grid[number], charts, strict=False)):
            draw_panel(axes, chart, legend=not styles)
            # A label that a neighbour repeats is written once.
            if column and charts[column - 1].y_label == chart.y_label:
                axes.set_ylabel("")
            if column < len(below) and below[column].x_label == chart.x_label:
                axes.set_xlabel("")
        for spare in grid[number][len(charts) :]:
            spare.remove()
    if styles:
        legend_below(figure, [Line(name, (), (), style=style) for name, style in styles.items()], rows=legend_rows)
    return figure


def depth_line(name: str, seen: DepthLine, style: Style, *, least: float | None, quantiles: bool = True) -> Line:
    """A line over depth with its band: quantiles, or one standard deviation; nothing is drawn below ``least``."""
    ends = (seen.low, seen.high) if quantiles else (seen.mean - seen.spread, seen.mean + seen.spread)
    mean, low, high = (y if least is None else np.maximum(y, least) for y in (seen.mean, *ends))
    return Line(name, seen.depth, mean, low, high, style=style)
