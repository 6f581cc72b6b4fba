"""Charts as data: lines and bars with their axes, and a page of panels under one header."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

LOG_DECADES = 2.0
"""Values that span more decades than this get a logarithmic axis."""

BEFORE = -1
"""Place of the tokens that enter block 0 on an axis of blocks; its tick says ``in``."""

Dash = str | tuple[int, tuple[float, ...]]


@dataclass(frozen=True)
class Style:
    """Style of one line or bar; colour, marker and dash each distinguish it."""

    colour: str
    marker: str = ""
    dash: Dash = "-"
    width: float = 1.5


@dataclass(frozen=True, eq=False)
class Line:
    """One curve.

    Args:
        name: name in the legend; lines without a name are not listed.
        x: positions.
        y: values; NaN breaks the line.
        low: lower end of the band around it.
        high: upper end of the band.
        floor: which points are at the float floor; drawn hollow.
        style: None for the next style of the palette.
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
    """A reference value.

    Args:
        value: its position on the axis.
        label: its name.
        kind: ``null`` is the value of random tokens of the same shape, ``floor`` the start of the zone in which a float
            format shows only rounding, ``collapse`` the value of collapsed tokens (drawn on the page only), ``level``
            anything else.
        axis: which axis the value is on; a floor on ``x`` extends to the right.
    """

    value: float
    label: str
    kind: Literal["level", "null", "floor", "collapse"] = "level"
    axis: Literal["x", "y"] = "y"


@dataclass(frozen=True)
class Note:
    """Text next to a point, in data coordinates."""

    text: str
    x: float
    y: float


@dataclass(frozen=True, eq=False)
class LineChart:
    """Curves over one x axis.

    Args:
        title: what is drawn.
        lines: in the order of the legend.
        subtitle: small text at the right of the title, such as the site.
        guides: reference values.
        notes: text next to points.
        x_label: of the x axis.
        y_label: of the y axis; empty if the title says it.
        log: whether the y axis is logarithmic.
        log_x: whether the x axis is logarithmic beyond 10.
        x_range: ends of the x axis; None fits the lines.
        y_range: ends of the y axis; None fits the lines.
        names: whether there is a legend of several lines.
        bars: whether lines are drawn as bars, side by side.
        empty: text to show if no line has a value.
    """

    title: str
    lines: tuple[Line, ...]
    subtitle: str = ""
    guides: tuple[Guide, ...] = ()
    notes: tuple[Note, ...] = ()
    x_label: str = "block"
    y_label: str = ""
    log: bool = False
    log_x: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float | None, float | None] | None = None
    names: Literal["legend", "none"] = "legend"
    bars: bool = False
    legend_title: str = ""
    empty: str = "undefined in every block"


@dataclass(frozen=True, eq=False)
class BarChart:
    """Horizontal bars on a logarithmic axis, from top to bottom.

    Args:
        title: what is drawn.
        names: names of the bars; empty if the neighbouring chart has them.
        values: lengths; None or a value that is not positive has no bar.
        styles: one per bar.
        missing: text in place of a missing bar.
        x_label: of the x axis.
    """

    title: str
    names: tuple[str, ...]
    values: tuple[float | None, ...]
    styles: tuple[Style, ...]
    missing: str = "undefined"
    x_label: str = ""


Panel = LineChart | BarChart


@dataclass(frozen=True, eq=False)
class Plot:
    """Panels under one header, row by row.

    Args:
        finding: what the figure says; its first sentence is in bold.
        settings: what was measured and how, small below it.
        panels: what is drawn.
        columns: panels per row.
        panel_size: width and height of a panel in inches.
        widths: relative widths of the columns; equal by default.
    """

    finding: str
    settings: str
    panels: tuple[Panel, ...]
    columns: int = 1
    panel_size: tuple[float, float] = (3.5, 2.45)
    widths: tuple[float, ...] = ()


def spans_decades(values: Iterable[float | None]) -> bool:
    """Whether a logarithmic axis suits these values: none negative, the positive ones spanning more than two decades.

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
