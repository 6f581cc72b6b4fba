"""How a ``remedy`` run is shown: one row per remedy, best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.runs.document import facts_line, run_document
from rankscope.verbs.measure.show import floor_guides
from rankscope.verbs.remedy.judge import NONE
from rankscope.views import BEFORE, BarChart, Cell, Column, Document, Line, LineChart, Plot, Style, Table, number
from rankscope.views.palette import BLACK, OTHERS, SERIES

if TYPE_CHECKING:
    from rankscope.runs.run import Run

Entry = Mapping[str, Any]
COLUMNS = (
    "rescued",
    Column("strength", spare=1),
    "residual",
    "cosine",
    "factor",
    "QK/V gradient",
    Column("parameters", spare=2),
)
MEANING = (
    "rescued: trainings of small networks with such norms and skips, which collapse without a remedy, that it rescued, "
    "of those it was tried in; residual: relative residual after the last block; cosine: mean cosine of tokens there; "
    "factor: of the residual per block; QK/V gradient: that of query and key weights over that of value weights, "
    "geometric mean over blocks; parameters: added."
)
SINGLED_OUT = 6


def document(run: Run) -> Document:
    """The table and what its columns mean."""
    entries: Sequence[Entry] = run.extra["remedies"]
    stack = entries[0]["stack"]
    rows = [_row(entry) for entry in entries]
    table = Table([Column("remedy", align="left"), *COLUMNS], rows, caption=f"stack: {stack}" if stack else "")
    return run_document(run, (table, MEANING))


def _row(entry: Entry) -> list[str | Cell]:
    return [
        str(entry["name"]).partition("=")[0],
        _rescued(entry.get("trained")),
        _shown(entry.get("strength")),
        Cell(_shown(entry["residual_last"]), ("floor",) if entry["at_floor"] else ()),
        _shown(entry["mean_cosine_last"]),
        _shown(entry["factor"]),
        _shown(entry["qk_over_v"]),
        f"{entry['parameters']:,}" if entry["parameters"] else "",
    ]


def _rescued(seen: Mapping[str, Any] | None) -> str:
    return "" if seen is None else f"{seen['rescued']} of {seen['trained']}"


def _shown(value: float | None) -> str:
    return "" if value is None else number(float(value))


def plot(run: Run) -> Plot:
    """Curves of the relative residual, then bars of its final value and of the gradient ratio per remedy."""
    entries: Sequence[Entry] = run.extra["remedies"]
    styles = _styles(entries)
    bars = tuple(Style(styles.get(str(entry["name"]), OTHERS)) for entry in entries)
    ends = BarChart(
        "relative residual, last block",
        tuple(str(entry["name"]) for entry in entries),
        tuple(entry["residual_last"] for entry in entries),
        bars,
    )
    ratios = tuple(entry["qk_over_v"] for entry in entries)
    panels: list[LineChart | BarChart] = [_chart(run, entries, styles), ends]
    if any(ratio is not None for ratio in ratios):
        panels.append(BarChart("gradient of Q, K over V", (), ratios, bars, missing="no ratio"))
    height = max(3.6, 0.26 * len(entries) + 1.1)
    return Plot(
        run.verdict,
        facts_line(run),
        tuple(panels),
        columns=len(panels),
        panel_size=(11.5 / len(panels), height),
        widths=(1.35, 1.0, 0.8)[: len(panels)],
    )


def _styles(entries: Sequence[Entry]) -> dict[str, str]:
    """A colour for the best few; the rest are grey."""
    others = [str(entry["name"]) for entry in entries if entry["name"] != NONE]
    return {NONE: BLACK} | dict(zip(others, SERIES[:SINGLED_OUT], strict=False))


def _chart(run: Run, entries: Sequence[Entry], styles: Mapping[str, str]) -> LineChart:
    named: list[Line] = []
    unnamed: list[Line] = []
    for entry in entries:
        name = str(entry["name"])
        values = np.array([np.nan if value is None else value for value in entry["residual"]])
        values[values <= 0] = np.nan
        width = 2.6 if name == NONE else 1.6 if name in styles else 1.0
        style = Style(styles.get(name, OTHERS), dash="--" if name == NONE else "-", width=width)
        line = Line(name if name in styles else "", np.arange(BEFORE, values.size - 1), values, style=style)
        (named if name in styles else unnamed).append(line)
    known = np.concatenate([np.asarray(line.y) for line in (*named, *unnamed)])
    return LineChart(
        "relative residual",
        (*unnamed, *named),  # grey lines below
        guides=floor_guides(run),
        log=True,
        y_range=(None, max(1.3, 1.3 * float(np.nanmax(known))) if np.isfinite(known).any() else 1.3),
        legend_title="others in grey" if unnamed else "",
    )
