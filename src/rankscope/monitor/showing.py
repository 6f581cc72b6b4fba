"""Small pictures of readings for a notebook: one cell per block and reading. Does not import torch."""

from __future__ import annotations

import html
import math

from rankscope.monitor.history import History
from rankscope.monitor.readings import Heatmap

METRIC = "relative_residual"
CELL = 10
LEFT, BELOW = 64, 34
"""Room for the names of blocks and steps."""
PALE, DARK = (0xBC, 0xD4, 0xE8), (0x08, 0x30, 0x5C)


def history_html(line: str, history: History) -> str:
    """A line of text above the relative residual of every block over the steps, dark where tokens are alike."""
    maps = [_picture(one) for one in history.heatmaps() if one.metric == METRIC]
    return f"<div><code>{html.escape(line)}</code>{''.join(maps)}</div>"


def _picture(heatmap: Heatmap) -> str:
    width, height = LEFT + CELL * max(len(heatmap.steps), 20), CELL * len(heatmap.layers)
    cells = [
        f'<rect x="{LEFT + CELL * column}" y="{height - CELL * (row + 1)}" width="{CELL}" height="{CELL}" '
        f'fill="{_colour(value)}">'
        f"<title>block {layer}, step {step}: {value:.2g}</title></rect>"
        for row, layer in enumerate(heatmap.layers)
        for column, (step, value) in enumerate(zip(heatmap.steps, heatmap.values[row], strict=True))
    ]
    end = LEFT + CELL * (len(heatmap.steps) - 1)
    words = [
        (LEFT - 4, height - 1, "end", f"block {heatmap.layers[0]}"),
        (LEFT - 4, 9, "end", f"{heatmap.layers[-1]}" if len(heatmap.layers) > 1 else ""),
        (LEFT, height + 13, "start", f"step {heatmap.steps[0]}"),
        (end + CELL, height + 13, "end", f"{heatmap.steps[-1]}" if len(heatmap.steps) > 8 else ""),
        (LEFT, height + 28, "start", "dark: residual 0.01 or less, pale: 1"),
    ]
    # Text in the colour of the page, so that it stays readable in a dark notebook.
    texts = [
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="currentColor" font-size="11">{text}</text>'
        for x, y, anchor, text in words
    ]
    label = html.escape(f"relative residual by block and step{f', {heatmap.stack}' if heatmap.stack else ''}")
    return (
        f'<br/><b style="font-size:.85em">{label}</b><br/><svg role="img" aria-label="{label}" width="{width}" '
        f'height="{height + BELOW}" viewBox="0 0 {width} {height + BELOW}">{"".join([*cells, *texts])}</svg>'
    )


def _colour(value: float) -> str:
    """Dark at a residual of 0.01 and below, pale at 1, on a logarithmic scale; red if there is no value."""
    if not math.isfinite(value):
        return "#c00"
    level = min(1.0, max(0.0, 1.0 + math.log10(max(value, 1e-9)) / 2.0))
    return "rgb({},{},{})".format(*(round(dark + level * (pale - dark)) for dark, pale in zip(DARK, PALE, strict=True)))
