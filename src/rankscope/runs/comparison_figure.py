"""A comparison as a figure: one panel per metric, the difference by block with its interval, and zero."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rankscope._errors import UnknownNameError
from rankscope.runs.comparison_text import difference_groups
from rankscope.runs.curves import names_in
from rankscope.runs.figure import COLOURS, FAINT, INK, MARKED_LAYERS, MARKERS, MOST_COLUMNS, PANEL_INCHES
from rankscope.runs.sheet import sheet
from rankscope.runs.summary import headline, main_site

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.comparison import Comparison

MOST_PANELS = 6
MOST_LINES = 5


def draw_comparison(comparison: Comparison, *, metrics: Sequence[str] | None = None, site: str | None = None) -> Figure:
    """Draw the chosen metrics; the line is the difference, the band its interval.

    Raises:
        MissingExtraError: without matplotlib.
        UnknownNameError: for a metric or a site that was not compared.
    """
    known = names_in(comparison.table, "metric")
    for name in metrics or ():
        if name not in known:
            raise UnknownNameError("metric in this comparison", name, known)
    if site is not None and site not in (sites := names_in(comparison.table, "site")):
        raise UnknownNameError("site in this comparison", site, sites)
    chosen = list(metrics) if metrics is not None else headline(comparison.table, MOST_PANELS)
    columns = max(1, min(len(chosen), MOST_COLUMNS))
    rows = max(1, math.ceil(len(chosen) / columns))
    width = max(PANEL_INCHES[0] * columns, 5.2)
    words = textwrap.wrap(comparison.verdict, int(width * 14.5))
    head = 0.5 + 0.17 * len(words)
    height = PANEL_INCHES[1] * rows + head
    with sheet("Comparison.plot", width, height) as figure:
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head / height))
        title = f"b − a with {comparison.settings['level']:.0%} intervals over sequences"
        figure.text(0.012, 1 - 0.1 / height, title, va="top", weight="bold", size=9.5, color=INK)
        figure.text(0.012, 1 - 0.32 / height, "\n".join(words), va="top", size=8.5, color=INK)
        for place, metric in enumerate(chosen):
            axes = figure.add_subplot(rows, columns, place + 1)
            _panel(axes, comparison.table, metric, site or main_site(comparison.table, metric))
    return figure


def _panel(axes: Axes, table: pa.Table, metric: str, site: str) -> None:
    from matplotlib.ticker import MaxNLocator

    here = table.filter(pc.and_(pc.equal(table["metric"], metric), pc.equal(table["site"], site)))
    groups = difference_groups(here)[:MOST_LINES]
    for order, (name, rows) in enumerate(groups):
        colour = COLOURS[order % len(COLOURS)]
        layers, middle, low, high = (rows[column].to_numpy() for column in ("layer", "difference", "low", "high"))
        axes.fill_between(layers, low, high, color=colour, alpha=0.2, linewidth=0)
        marker = MARKERS[order % len(MARKERS)] if layers.size <= MARKED_LAYERS else ""
        axes.plot(layers, middle, color=colour, marker=marker, ms=3.5, linewidth=1.5, label=name)
    axes.axhline(0.0, color=INK, linewidth=0.8)
    axes.set_title(metric.replace("_", " "), loc="left", size=9, weight="bold", color=INK)
    axes.set_title(site, loc="right", size=7.5, color=FAINT)
    axes.set_xlabel("block")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    if len(groups) > 1:
        axes.legend(frameon=False, fontsize=7)
