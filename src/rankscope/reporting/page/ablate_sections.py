"""Sections of an ablation: the networks over depth, and their last blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankscope.reporting.page.charts import Chart, Views, guides_of, line_view, metrics_in_order
from rankscope.reporting.page.safe_text import clipped, visible
from rankscope.reporting.page.sections import section
from rankscope.runs.curves import names_in
from rankscope.runs.run import Run
from rankscope.verbs.ablate.judge import MEASURE, AblationArm, arms
from rankscope.verbs.ablate.show import STYLES
from rankscope.verdicts.states import COLLAPSED_RESIDUAL
from rankscope.views import UNDEFINED, Cell, Row, Section, Table, number

GRID_COLUMNS = ("variant", "mask", "weights")


@section("ablate", "grid")
def ablation_section(run: Run) -> Section | None:
    """One line per network, switches for metric and setting, and the grid of last blocks."""
    if not set(GRID_COLUMNS) <= set(run.table.column_names):
        return None
    views: Views = {}
    for metric in metrics_in_order(run.table):
        groups: dict[str, list[AblationArm]] = {}
        for arm in arms(run.table, metric):
            groups.setdefault(setting_of(arm), []).append(arm)
        for setting, members in groups.items():
            lines = [(arm.variant, arm.line) for arm in members]
            views[metric, setting] = line_view(metric, lines, guides_of(run, metric), styles=STYLES)
    if not views:
        return None
    chart = Chart(
        "lines",
        "One line per network",
        "The same weights and inputs, with parts removed: attention alone (pure), with norms, skips, MLPs, and the "
        "whole model (full).",
        ("metric", "network"),
        views,
    )
    parts: list[Chart | Table] = [chart]
    if MEASURE in names_in(run.table, "metric"):
        parts.append(_grid(list(arms(run.table))))
    return Section("Which component does it", "What happens to the tokens when a part is missing.", tuple(parts))


def setting_of(arm: AblationArm) -> str:
    """Weights, mask and stack of a network in words."""
    return ", ".join(part for part in (f"{arm.weights} weights", f"{arm.mask} mask", arm.stack) if part)


def _grid(members: Sequence[AblationArm]) -> Table:
    settings = list(dict.fromkeys(setting_of(arm) for arm in members))
    arms = {(arm.variant, setting_of(arm)): arm for arm in members}
    rows: list[Row] = [
        [visible(variant), *(_end(arms.get((variant, setting))) for setting in settings)]
        for variant in dict.fromkeys(arm.variant for arm in members)
    ]
    caption = f"Relative residual after the last block; below {COLLAPSED_RESIDUAL:g} the tokens are taken as one"
    return Table(["network", *(clipped(name, 60) for name in settings)], rows, caption)


def _end(arm: AblationArm | None) -> Cell:
    if arm is None or not arm.line.mean.size:
        return Cell("")
    value = float(arm.line.mean[-1])
    if not np.isfinite(value):
        return Cell(UNDEFINED)
    at_floor = bool(arm.line.any_floor[-1])
    return Cell(number(value), ("floor",) if at_floor else ("bad",) if value <= COLLAPSED_RESIDUAL else ("good",))
