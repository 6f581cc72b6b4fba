"""Curves over depth as the page's script draws them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope.reporting.page.facts import FACTS
from rankscope.reporting.page.parts import plain, plain_list
from rankscope.reporting.page.wording import clipped
from rankscope.runs.curves import Curve, curve, names_in
from rankscope.runs.figure import LOG_DECADES, RELATIVE
from rankscope.runs.rows import of_stack, only
from rankscope.runs.run import Run
from rankscope.runs.summary import stacks_of
from rankscope.runs.text import number

MOST_SERIES = 24


def series_of(name: str, line: Curve) -> dict[str, Any]:
    """One line with its band; ``floor`` lists the points at the float floor."""
    return {
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
    guides: Sequence[Mapping[str, Any]] = (),
    *,
    form: str = "number",
) -> dict[str, Any]:
    """A view of a line chart: the metric by block, one line per name."""
    series = [series_of(name, line) for name, line in lines][:MOST_SERIES]
    return {
        "metric": metric,
        "series": series,
        "guides": [dict(guide) for guide in guides],
        "log": form == "number" and spans_decades(value for one in series for value in one["y"]),
        "form": form,
    }


def guides_for(run: Run, metric: str, *, stream: bool = True) -> list[dict[str, Any]]:
    """Lines to compare with: the same-shape random value, the float floor, the value at collapse."""
    found: list[dict[str, Any]] = []
    reference: Any = (run.null or {}).get(metric)
    if stream and isinstance(reference, Mapping) and isinstance(reference.get("mean"), (int, float)):
        level = float(reference["mean"])
        found.append({"kind": "null", "value": plain(level), "label": f"same-shape random {number(level)}"})
    relative = run.floor.get("relative")
    if metric.startswith(RELATIVE) and isinstance(relative, (int, float)) and relative > 0:
        words = f"{run.floor.get('dtype')} sees nothing below {number(float(relative))}"
        found.append({"kind": "floor", "value": plain(float(relative)), "label": clipped(words, 60)})
    fact = FACTS.metrics.get(metric)
    if fact is not None and fact.at_collapse is not None:
        found.append({"kind": "collapse", "value": fact.at_collapse, "label": f"collapse = {fact.at_collapse:g}"})
    return [guide for guide in found if guide["value"] is not None]


def spans_decades(values: Iterable[float | None]) -> bool:
    """Whether a logarithmic axis shows these better: all positive (or zero), and more than a few decades apart."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    positive = known[known > 0]
    if positive.size == 0 or (known < 0).any():
        return False
    return bool(np.log10(positive.max() / positive.min()) > LOG_DECADES)


def lines_by_stack(table: pa.Table, metric: str, site: str) -> list[tuple[str, Curve]]:
    """The curve of each stack that has one; a model with one stack has one line without a name."""
    found = []
    for stack in stacks_of(table):
        here = of_stack(only(table, metric=metric), stack)
        if site in names_in(here, "site"):
            found.append((stack or "", curve(here, metric, site)))
    return found
