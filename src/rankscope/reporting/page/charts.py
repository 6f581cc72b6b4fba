"""Data of the charts that the page's script draws: one view per combination of choices, as plain values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rankscope.reporting.page.facts import FACTS
from rankscope.reporting.page.safe_text import clipped, spoken
from rankscope.runs.curves import Curve, mean_grid, names_in, usable
from rankscope.runs.rows import only
from rankscope.runs.run import Run
from rankscope.runs.summary import HEADLINE, MAIN_SITES
from rankscope.verbs.measure.show import guides as run_guides
from rankscope.verdicts.states import COLLAPSED_RESIDUAL
from rankscope.views import Guide, Style, spans_decades
from rankscope.views.palette import ON_PAGE

ChartKind = Literal["lines", "bars", "waterfall", "heat", "matrix", "timeline"]
DIGITS = 5
MOST_SERIES = 24


Views = dict[tuple[str, ...], Mapping[str, Any]]
"""The data to draw, for each existing combination of options."""

SPOKEN = ("metric", "quantity", "theorem")
"""Choices whose options are names of things, shown in words."""


@dataclass(frozen=True)
class Chart:
    """A chart with one or more views.

    Args:
        kind: the function of the page's script that draws it.
        title: what it shows.
        caption: how to read it.
        choices: names of the switches, one per part of a view's key; their options are the values in the keys.
        views: the data to draw, for each existing combination of options.
        slider: the choice shown as a slider instead of a list.
        cards: whether the first choice is also offered as cards with a small curve.
        folded: whether the page shows it collapsed.
    """

    kind: ChartKind
    title: str
    caption: str
    choices: tuple[str, ...]
    views: Mapping[tuple[str, ...], Mapping[str, Any]]
    slider: str | None = None
    cards: bool = False
    folded: bool = False

    def payload(self) -> dict[str, Any]:
        """What the page's script needs."""
        return {
            "kind": self.kind,
            "title": self.title,
            "choices": [
                {"name": name, "options": [(value, _label(name, value)) for value in dict.fromkeys(values)]}
                for name, values in zip(self.choices, zip(*self.views, strict=True), strict=False)
            ],
            "slider": self.slider,
            "cards": self.cards,
            "views": [{"key": list(key), **view} for key, view in self.views.items()],
        }


def _label(choice: str, option: str) -> str:
    if choice in SPOKEN:
        return clipped(spoken(option), 60)
    return f"block {option}" if choice == "block" else clipped(option, 60)


def plain(value: float) -> float | None:
    """Round a number to store it compactly; None if it is not finite.

    Example:
        >>> plain(0.123456789), plain(float("nan"))
        (0.12346, None)
    """
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def plain_list(values: NDArray[np.float64] | Sequence[float]) -> list[float | None]:
    """Apply :func:`plain` to each value."""
    return [plain(float(value)) for value in values]


def series_of(name: str, line: Curve, style: Style | None = None) -> dict[str, Any]:
    """One line with its band; ``floor`` lists the points at the float floor. Without a style the page chooses one."""
    return {
        **({} if style is None else {"colour": ON_PAGE[style.colour]}),
        "name": clipped(name, 40),
        "x": [int(layer) for layer in line.layers],
        "y": plain_list(line.mean),
        "low": plain_list(line.low),
        "high": plain_list(line.high),
        "floor": [int(position) for position in np.flatnonzero(line.any_floor)],
    }


def line_view(
    metric: str,
    lines: Iterable[tuple[str, Curve]],
    guides: Sequence[Guide] = (),
    *,
    form: str = "number",
    styles: Mapping[str, Style] | None = None,
) -> dict[str, Any]:
    """A view of a line chart: the metric by block, one line per name, in the colours of the figure if given."""
    series = [series_of(name, line, (styles or {}).get(name)) for name, line in lines][:MOST_SERIES]
    return {
        "metric": metric,
        "series": series,
        "guides": [
            {"kind": guide.kind, "value": value, "label": clipped(guide.label, 60)}
            for guide in guides
            if (value := plain(guide.value)) is not None
        ],
        "log": form == "number" and spans_decades(value for one in series for value in one["y"]),
        "form": form,
    }


def guides_of(run: Run, metric: str, site: str = "block.out") -> list[Guide]:
    """Reference values: random tokens or inputs (not for attention), the float floor, the value at collapse."""
    random = not site.endswith(".probs")
    guides = [guide for guide in run_guides(run, metric, site) if random or guide.kind != "null"]
    fact = FACTS.metrics.get(metric)
    if fact is not None and fact.at_collapse is not None:
        guides.append(Guide(fact.at_collapse, f"collapse = {fact.at_collapse:g}", "collapse"))
    return guides


def metrics_in_order(table: pa.Table) -> list[str]:
    """Names of the metrics, headline metrics first."""
    known = names_in(table, "metric")
    return [name for name in HEADLINE if name in known] + [name for name in known if name not in HEADLINE]


def sites_in_order(table: pa.Table, metric: str) -> list[str]:
    """Sites of a metric, its main one first."""
    sites = names_in(only(table, metric=metric), "site")
    return sorted(sites, key=lambda site: (MAIN_SITES.index(site) if site in MAIN_SITES else len(MAIN_SITES), site))


def heat_view(
    metric: str,
    columns: Iterable[int],
    rows: Iterable[int],
    values: NDArray[np.float64],
    names: tuple[str, str] = ("head", "block"),
    marks: Sequence[Sequence[Any]] = (),
) -> dict[str, Any]:
    """A view of a heatmap, whose colours span the range of the metric, the same in every report.

    Args:
        metric: its name.
        columns: numbers of the columns.
        rows: numbers of the rows.
        values: shape ``(rows, columns)``.
        names: what a row and a column are.
        marks: row, column and words of each ring.
    """
    fact = FACTS.metrics.get(metric.removeprefix("inputs_"))
    return {
        "metric": metric,
        "columns": [int(column) for column in columns],
        "rows": [int(row) for row in rows],
        "values": [plain_list(row) for row in values],
        "range": [None, None] if fact is None else plain_list(fact.ends),
        "collapse": None if fact is None else fact.at_collapse,
        "threshold": COLLAPSED_RESIDUAL if metric == "relative_residual" else None,
        "log": spans_decades(plain_list(values.ravel())),
        "names": list(names),
        "marks": [list(mark) for mark in marks],
    }


def head_grid(rows: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Blocks, heads, and the means over sequences of the usable values, shape ``(heads, blocks)``."""
    layers, column = np.unique(rows["layer"].to_numpy(), return_inverse=True)
    heads, row = np.unique(rows["head"].to_numpy(), return_inverse=True)
    value = rows["value"].to_numpy()
    mean = mean_grid((heads.size, layers.size), (row, column), value, usable(rows) & np.isfinite(value))
    return layers.astype(np.int64), heads.astype(np.int64), mean
