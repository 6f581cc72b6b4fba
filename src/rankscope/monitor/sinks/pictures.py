"""Heatmaps as images: blocks upward, readings to the right, alarms marked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rankscope.errors import MissingExtraError
from rankscope.metrics import METRICS
from rankscope.monitor.acting import LOGGER
from rankscope.monitor.readings import Alarm, Heatmap, scalar_name
from rankscope.views import Table, spans_decades
from rankscope.views.figures import drawing_style
from rankscope.views.palette import APART_TO_ALIKE, FAINT, INK, UNKNOWN, VERMILION
from rankscope.views.text import markdown_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Picture = npt.NDArray[np.uint8]

INCHES, DOTS_PER_INCH = (6.4, 3.2), 100


class Painter:
    """Draws heatmaps for one sink; without matplotlib it says so once and draws nothing."""

    def __init__(self) -> None:
        self._silent = False

    def __call__(self, heatmap: Heatmap) -> Picture | None:
        """Height x width x 3, or None without matplotlib or without data."""
        if self._silent or not heatmap.layers:
            return None
        try:
            with drawing_style("A heatmap", {}):
                return pixels(draw(heatmap))
        except MissingExtraError as error:
            self._silent = True
            LOGGER.warning("No heatmaps: %s Scalars and alarms are sent all the same.", error)
            return None


def draw(heatmap: Heatmap) -> Figure:
    """One column per reading and one row per block, in the colours of the report: dark where tokens are alike."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH)
    axes = figure.add_axes((0.09, 0.165, 0.765, 0.725))
    values = np.array(heatmap.values, dtype=np.float64)
    known = values[np.isfinite(values)]
    if known.size == 0:
        axes.text(0.5, 0.5, "undefined at every reading", transform=axes.transAxes, ha="center", color=FAINT)
    else:
        extent = (-0.5, len(heatmap.steps) - 0.5, -0.5, len(values) - 0.5)
        shown = np.ma.masked_invalid(values)
        image = axes.imshow(
            shown,
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            extent=extent,
            **_shades(heatmap.metric, known),
        )
        _colour_bar(figure, image)
    _mark_alarms(axes, heatmap)
    _dress(axes, heatmap)
    return figure


def pixels(figure: Figure) -> Picture:
    """The figure as RGB values, without changing the state of pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _colour_bar(figure: Figure, image: Any) -> None:
    """A few plain numbers: fine ticks and math text would take most of the drawing time."""
    bar = figure.colorbar(image, cax=figure.add_axes((0.87, 0.165, 0.022, 0.725)), format="%.3g")
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=10, length=3)


def _shades(metric: str, known: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Colours over the declared range of the metric; over whole decades of what was read if it spans some."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

    name = metric.removeprefix("inputs_")
    spec = METRICS[name] if name in METRICS else None  # noqa: SIM401 - a registry raises an error of its own
    least, most = float(known.min()), float(known.max())
    is_log = least > 0.0 and spans_decades((least, most))
    low, high = (-math.inf, math.inf) if spec is None else spec.range
    low = 10.0 ** math.floor(math.log10(least)) if is_log else low if math.isfinite(low) else least
    high = high if math.isfinite(high) else most
    high = high if high > low else low + max(abs(low), 1.0)
    alike = None if spec is None else spec.at_collapse
    is_low_alike = alike is not None and alike - low <= high - alike
    colours = LinearSegmentedColormap.from_list("alike", APART_TO_ALIKE[:: -1 if is_low_alike else 1])
    norm = LogNorm(low, high) if is_log else Normalize(low, high)
    return {"norm": norm, "cmap": colours.with_extremes(bad=UNKNOWN)}


def _mark_alarms(axes: Axes, heatmap: Heatmap) -> None:
    rows = {layer: row for row, layer in enumerate(heatmap.layers)}
    for step, layer, _ in heatmap.alarms:
        if layer in rows and heatmap.steps:
            column = min(int(np.searchsorted(heatmap.steps, step)), len(heatmap.steps) - 1)
            axes.scatter(
                column,
                rows[layer],
                marker="^",
                s=90,
                color=VERMILION,
                edgecolors="white",
                linewidths=1.2,
                clip_on=False,
                zorder=3,
            )


def _dress(axes: Axes, heatmap: Heatmap) -> None:
    columns, rows = len(heatmap.steps), len(heatmap.layers)
    shown = np.unique(np.linspace(0, columns - 1, min(columns, 7)).round().astype(int))
    axes.set_xticks(shown, [str(heatmap.steps[column]) for column in shown])
    shown = np.unique(np.linspace(0, rows - 1, min(rows, 7)).round().astype(int))
    axes.set_yticks(shown, [str(heatmap.layers[row]) for row in shown])
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(-0.5, rows - 0.5)
    axes.tick_params(length=3, width=0.7, colors=INK, labelsize=10)
    axes.set_xlabel("step (one column per reading)", size=11, color=INK)
    axes.set_ylabel("block", size=11, color=INK)
    title = heatmap.metric.replace("_", " ") + ("" if heatmap.stack is None else f", {heatmap.stack}")
    axes.set_title(title, loc="left", size=12.5, weight="bold", color=INK)
    if heatmap.alarms:
        axes.set_title("\N{BLACK UP-POINTING TRIANGLE} alarm raised", loc="right", size=11, color=VERMILION)


ALARM_NAME = "rankscope/alarm"
MARKS = {"raised": "\N{WARNING SIGN} raised", "cleared": "\N{CHECK MARK} cleared"}


def title(alarm: Alarm) -> str:
    """A short title for a list of notifications.

    Example:
        >>> title(Alarm("token_collapse", "raised", 90, None, 7, "...", {}, "attention"))
        'rankscope: token collapse raised at block 7'
    """
    where = "" if alarm.layer is None else f" at block {alarm.layer}"
    of = "" if alarm.stack is None else f" of the {alarm.stack}"
    return f"rankscope: {alarm.name.replace('_', ' ')} {alarm.state}{where}{of}"


def as_markdown(alarm: Alarm) -> str:
    """State, sentence, and a table of the evidence."""
    rows = [[name.replace("_", " "), f"{value:.4g}"] for name, value in alarm.evidence.items()]
    table = f"\n\n{markdown_text(Table(['evidence', 'value'], rows))}" if rows else ""
    return f"**{MARKS[alarm.state]}** {alarm.sentence}{table}"


def artifact_name(metric: str, stack: str | None) -> str:
    """Name of an image among the files of a run, ``rankscope/METRIC/layers.png``."""
    return f"{scalar_name(metric, stack, 'layers')}.png"
