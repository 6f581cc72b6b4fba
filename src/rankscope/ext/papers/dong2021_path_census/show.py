"""Share of paths by length, drawn and as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.ext.papers._drawing import COLOURS, Look, drawn
from rankscope.ext.papers._spec import METHOD
from rankscope.ext.papers.dong2021_path_census.run import COUNT, SHARE
from rankscope.runs.curves import names_in
from rankscope.runs.rows import only
from rankscope.views import Line, LineChart, Style, Table
from rankscope.views.palette import MARKERS
from rankscope.views.text import markdown_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

SHORT = 6


def _shares(run: Run, model: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Lengths, shares, and the number of heads."""
    rows = only(run.table, metric=SHARE, model=model)
    return rows["layer"].to_numpy(), rows["value"].to_numpy(), int(rows["heads"][0].as_py())


def judge(run: Run) -> str:
    """Mean length and share of short paths in the largest model."""
    name = names_in(run.table, "model")[-1]
    length, share, _ = _shares(run, name)
    return (
        f"Nearly all paths are long: in {name} the average path passes through {(length * share).sum():.2f} of "
        f"{length[-1]} blocks, and only {share[length <= SHORT].sum():.2g} of all paths pass through {SHORT} or fewer. "
        "If short paths carry the signal, it is not because there are many of them."
    )


def describe(run: Run) -> str:
    """A table of totals, mean lengths and the share of short paths."""
    rows = []
    for name in names_in(run.table, "model"):
        length, share, heads = _shares(run, name)
        total = float(only(run.table, metric=COUNT, model=name)["value"].to_numpy().sum())
        mean, short = float((length * share).sum()), float(share[length <= SHORT].sum())
        rows.append((name, str(heads), str(length[-1]), f"{total:.3g}", f"{mean:.2f}", f"{short:.2g}"))
    head = ("model", "heads", "blocks", "paths", "mean length", f"share with length ≤ {SHORT}")
    method = (
        "The counts are exact integers; no model was run. They say how many paths of each length there are, not how "
        "much a path contributes."
    )
    return "\n\n".join([markdown_text(Table(head, rows)), METHOD, method])


def draw(run: Run) -> dict[str, Figure]:
    """Share of paths by length, and cumulative share."""
    shown = [name for name in names_in(run.table, "model") if int(_shares(run, name)[0].size) <= 33]
    shown = shown if len(shown) <= 5 else [shown[i] for i in (0, 1, 3, 4, 5)]
    single, up_to = [], []
    for name, colour, marker in zip(shown, COLOURS, MARKERS, strict=False):
        length, share, heads = _shares(run, name)
        label, style = f"{name} ({heads}, {length[-1]})", Style(colour, marker)
        single.append(Line(label, length, share, style=style))
        up_to.append(Line(label, length, np.cumsum(share), style=style))
    entered = "path length (blocks passed through)"
    left: Look = {"y_range": (-0.02, 1.02), "legend_title": "model (heads, blocks)"}
    right: Look = {"y_range": (1e-12, 2), "log": True, "names": "none"}
    panels = [
        LineChart("share of all paths", tuple(single), x_label=entered, **left),
        LineChart("share of paths of at most this length", tuple(up_to), x_label=entered, **right),
    ]
    figure = drawn(
        "How long are the paths through a transformer with skips?",
        "Each block is skipped or entered through one of its H heads, so path lengths are binomial with success "
        "probability H/(1+H).",
        [panels],
    )
    return {"figure": figure}
