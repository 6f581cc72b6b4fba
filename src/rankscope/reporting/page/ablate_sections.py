"""Section of an ablation: the networks over depth."""

from __future__ import annotations

from rankscope.reporting.page.charts import Chart, Views, guides_of, line_view, metrics_in_order
from rankscope.reporting.page.sections import section
from rankscope.runs.run import Run
from rankscope.verbs.ablate.judge import AblationArm, arms
from rankscope.verbs.ablate.show import STYLES
from rankscope.views import Section

GRID_COLUMNS = ("variant", "mask", "weights")


@section("ablate", "grid")
def ablation_section(run: Run) -> Section | None:
    """One line per network, and switches for metric and setting."""
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
    return Section("Which component does it", "What happens to the tokens when a part is missing.", (chart,))


def setting_of(arm: AblationArm) -> str:
    """Weights, mask and stack of a network in words."""
    return ", ".join(part for part in (f"{arm.weights} weights", f"{arm.mask} mask", arm.stack) if part)
