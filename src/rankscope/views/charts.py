"""Charts as data: lines, bars and maps with their axes, and a page of panels under one header."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

LOG_DECADES = 2.0
"""Values that span more decades than this get a logarithmic axis."""

Dash = str | tuple[int, tuple[float, ...]]


@dataclass(frozen=True)
class Style:
    """How one line or bar is drawn; colour, marker and dash each tell it apart."""

    colour: str
    marker: str = ""
    dash: Dash = "-"
    width: float = 1.5


@dataclass(frozen=True, eq=False)
class Line:
    """One curve.

    Args:
        name: for the legend; a line without a name is not in it.
        x: positions.
        y: values; NaN breaks the line.
        low: lower end of the band around it.
        high: upper end of the band.
        floor: which points are at the float floor; they are drawn hollow.
        style: None takes the next style of the palette.
    """

    name: str
    x: ArrayLike
    y: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None
    floor: ArrayLike | None = None
    style: Style | None = None


@dataclass(frozen=True)
class Guide:
    """A value to compare with.

    Args:
        value: where it stands.
        label: what it is.
        kind: ``null`` is the same-shape random value, ``floor`` begins the zone in which a float format shows only
            rounding, ``collapse`` the value of collapsed tokens (drawn on the page only), ``level`` anything else.
        axis: which axis the value is on; a floor on ``x`` reaches from there to the right.
    """

    value: float
    label: str
    kind: Literal["level", "null", "floor", "collapse"] = "level"
    axis: Literal["x", "y"] = "y"


@dataclass(frozen=True)
class Note:
    """Words beside a point, in the units of the axes."""

    text: str
    x: float
    y: float


@dataclass(frozen=True, eq=False)
class LineChart:
    """Curves over one x axis.

    Args:
        title: what is drawn.
        lines: in the order of the legend.
        aside: small words at the other end of the title, such as the site.
        guides: values to compare with.
        notes: words beside points.
        x_label: of the x axis.
        y_label: of the y axis; empty where the title says it.
        log: whether the y axis is logarithmic.
        log_x: whether the x axis is logarithmic beyond its first ten.
        x_range: ends of the x axis; None fits the lines.
        y_range: ends of the y axis; None fits the lines.
        names: where the names of several lines stand.
        empty: words in place of lines that hold no value.
    """

    title: str
    lines: tuple[Line, ...]
    aside: str = ""
    guides: tuple[Guide, ...] = ()
    notes: tuple[Note, ...] = ()
    x_label: str = "block"
    y_label: str = ""
    log: bool = False
    log_x: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float | None, float | None] | None = None
    names: Literal["legend", "ends", "none"] = "legend"
    legend_title: str = ""
    empty: str = "undefined in every block"


@dataclass(frozen=True, eq=False)
class BarChart:
    """Horizontal bars on a logarithmic axis, downwards.

    Args:
        title: what is drawn.
        names: of the bars; empty where the chart beside it names them.
        values: lengths; None or a value that is not positive has no bar.
        styles: one per bar.
        missing: what is written in place of a bar.
        x_label: of the x axis.
    """

    title: str
    names: tuple[str, ...]
    values: tuple[float | None, ...]
    styles: tuple[Style, ...]
    missing: str = "undefined"
    x_label: str = ""


@dataclass(frozen=True, eq=False)
class HeatMap:
    """Tiles.

    Args:
        title: what is drawn.
        values: shape ``(rows, columns)``; the first row is at the bottom.
        x_ticks: label of each column.
        y_ticks: label of each row.
        x_label: of the x axis.
        y_label: of the y axis.
        limits: values of the darkest and the lightest colour; what lies beyond is drawn as they are.
        contour: value at which a line parts the tiles.
        dotted: which tiles carry a dot, same shape as ``values``.
        bar_label: of the colour bar.
    """

    title: str
    values: ArrayLike
    x_ticks: Sequence[str]
    y_ticks: Sequence[str]
    x_label: str
    y_label: str
    limits: tuple[float, float]
    contour: float | None = None
    dotted: ArrayLike | None = None
    bar_label: str = ""


Panel = LineChart | BarChart | HeatMap


@dataclass(frozen=True, eq=False)
class Plot:
    """Panels under one header, row by row.

    Args:
        title: first line of the header, in bold.
        subtitle: the sentence below it.
        panels: what is drawn.
        columns: panels in a row.
        panel_size: width and height of a panel in inches.
        widths: relative widths of the columns; equal by default.
        shared_legend: one legend below all panels, from the lines of the first.
    """

    title: str
    subtitle: str
    panels: tuple[Panel, ...]
    columns: int = 1
    panel_size: tuple[float, float] = (3.5, 2.45)
    widths: tuple[float, ...] = ()
    shared_legend: bool = False


def spans_decades(values: Iterable[float | None]) -> bool:
    """Whether a logarithmic axis shows these better: none negative, and the positive ones more than two decades apart.

    Example:
        >>> spans_decades([1.0, 1e-3]), spans_decades([1.0, 0.1]), spans_decades([-1.0, 1e-3])
        (True, False, False)
    """
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    known = known[np.isfinite(known)]
    positive = known[known > 0]
    if positive.size == 0 or (known < 0).any():
        return False
    return bool(np.log10(positive.max() / positive.min()) > LOG_DECADES)
