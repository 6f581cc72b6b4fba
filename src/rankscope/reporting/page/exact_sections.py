"""Sections of an exact run: residuals far below the float floor, order and factor of each block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rankscope.reporting.page.charts import Chart, Views, line_view
from rankscope.reporting.page.safe_text import spoken, visible
from rankscope.reporting.page.sections import section
from rankscope.runs.curves import Curve, names_in
from rankscope.runs.run import Run
from rankscope.runs.summary import stacks_of
from rankscope.verbs.exact.judge import exact_curves
from rankscope.verbs.exact.show import STYLES, exact_table
from rankscope.views import Guide, Section, Table

RELATIVE = "log10_relative_residual"
DIGITS = "digits_of_agreement"
PER_BLOCK = ("order", "factor", "linear_factor")


@section("exact", "orders")
def exact_section(run: Run) -> Section | None:
    """Residuals by block in each arithmetic, then the order and factor of each block."""
    residuals: Views = {}
    blocks: Views = {}
    for stack in stacks_of(run.table):
        name = str(stack or "")
        for metric in ("log10_residual", RELATIVE):
            lines = exact_curves(run.table, metric, stack)
            if lines:
                guides = _floors(run) if metric == RELATIVE else []
                residuals[metric, name] = line_view(metric, lines.items(), guides, form="power", styles=STYLES)
        if (RELATIVE, name) in residuals:
            relative = exact_curves(run.table, RELATIVE, stack)
            residuals[DIGITS, name] = _digits(run, relative)
        for metric in (one for one in PER_BLOCK if one in names_in(run.table, "metric")):
            if lines := exact_curves(run.table, metric, stack):
                blocks[metric, name] = line_view(metric, lines.items(), _order_guides(metric))
    if not residuals:
        return None
    first = {key: residuals[key] for key in sorted(residuals, key=lambda key: key[0] != RELATIVE)}
    caption = "One line per arithmetic: exact has no floor, each float format stops at its own."
    parts: list[Chart | Table] = [
        Chart("lines", "How small the residual becomes", caption, ("quantity", "stack"), first)
    ]
    if blocks:
        caption = "Order 3 cubes the residual with each block; order 1 multiplies it by the factor."
        parts.append(Chart("lines", "Order and factor", caption, ("quantity", "stack"), blocks))
    for stack in stacks_of(run.table):
        if (RELATIVE, str(stack or "")) in residuals:
            caption = "log10 of the residual by block" + (f", {visible(stack)}" if stack else "")
            parts.append(replace(exact_table(run, stack), caption=f"{caption}; * at the float floor", folded=True))
    return Section("How fast, really", "Exact arithmetic follows the residual where floats see only rounding.",
                   tuple(parts))  # fmt: skip


def _digits(run: Run, relative: Mapping[str, Curve]) -> dict[str, Any]:
    """The same as digits of agreement on a logarithmic axis, on which order 3 is a straight line."""

    def turned(line: Curve) -> Curve:
        digits, low, high = (np.where(part < 0, -part, np.nan) for part in (line.mean, line.high, line.low))
        return replace(line, mean=digits, low=low, high=high)

    guides = [replace(guide, value=-guide.value) for guide in _floors(run)]
    view = line_view(DIGITS, [(name, turned(line)) for name, line in relative.items()], guides, styles=STYLES)
    return {**view, "log": True}


def _floors(run: Run) -> list[Guide]:
    formats = run.floor.get("formats")
    if not isinstance(formats, Mapping):
        return []
    return [
        Guide(float(np.log10(value)), f"{spoken(name)} ends")
        for name, value in formats.items()
        if isinstance(value, (int, float)) and value > 0
    ]


def _order_guides(metric: str) -> list[Guide]:
    if metric == "order":
        return [Guide(3, "order 3: cubed"), Guide(1, "order 1: multiplied")]
    return [Guide(1, "unchanged")]
