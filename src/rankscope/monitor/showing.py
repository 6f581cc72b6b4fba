"""Small pictures of readings for a notebook: one cell per block and reading. Does not import torch."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from rankscope.monitor.history import History
from rankscope.monitor.readings import Heatmap, Reading

METRIC = "relative_residual"
COLUMNS, CELL = 64, 8


def history_html(line: str, readings: Sequence[Reading]) -> str:
    """A line of text above the relative residual of every block over the steps, dark where tokens are alike."""
    history = History(COLUMNS)
    for reading in readings:
        history.take(reading)
    maps = [_picture(one) for one in history.heatmaps() if one.metric == METRIC]
    return f"<div><code>{html.escape(line)}</code>{''.join(maps)}</div>"


def _picture(heatmap: Heatmap) -> str:
    width, height = CELL * len(heatmap.steps), CELL * len(heatmap.layers)
    cells = [
        f'<rect x="{CELL * column}" y="{height - CELL * (row + 1)}" width="{CELL}" height="{CELL}" '
        f'fill="{_grey(value)}">'
        f"<title>block {layer}, step {step}: {value:.2g}</title></rect>"
        for row, layer in enumerate(heatmap.layers)
        for column, (step, value) in enumerate(zip(heatmap.steps, heatmap.values[row], strict=True))
    ]
    label = html.escape(f"relative residual by block and step{f', {heatmap.stack}' if heatmap.stack else ''}")
    return (
        f'<br/><svg role="img" aria-label="{label}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{"".join(cells)}</svg>'
    )


def _grey(value: float) -> str:
    """Black at a residual of 0.01 and below, white at 1, on a logarithmic scale; red if there is no value."""
    if not math.isfinite(value):
        return "#c00"
    level = round(255 * min(1.0, max(0.0, 1.0 + math.log10(max(value, 1e-9)) / 2.0)))
    return f"rgb({level},{level},{level})"
