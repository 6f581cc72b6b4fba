"""Several runs together: their verdicts in a list, and the metrics they share in one chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankscope.reporting.page.chapters import is_plain
from rankscope.reporting.page.depth import metric_and_site, metrics_in_order, sites_in_order
from rankscope.reporting.page.lines import line_view, lines_by_stack
from rankscope.reporting.page.origins import model_name
from rankscope.reporting.page.parts import Chart, Section
from rankscope.runs.curves import Curve
from rankscope.runs.run import Run

MOST_RUNS = 12


def side_by_side(runs: Sequence[Run], detail: int) -> Section | None:
    """A metric over depth for every run that has it; None where no two runs share one."""
    plain = [run for run in runs if is_plain(run) and run.table.num_rows][:MOST_RUNS]
    if len(plain) < 2:
        return None
    names = run_names(plain)
    views: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for metric in dict.fromkeys(name for run in plain for name in metrics_in_order(run.table)):
        sites = dict.fromkeys(site for run in plain for site in sites_in_order(run.table, metric))
        for site in list(sites)[: None if detail > 0 else 1]:
            lines = _lines(plain, names, metric, site)
            if len({name for name, _ in lines}) > 1:
                views[metric, site] = line_view(metric, lines)
    if not views:
        return None
    chart = Chart("lines", "The same metric in each run", "Mean over sequences; the band is 10% to 90%.",
                  metric_and_site(views), views)  # fmt: skip
    return Section("Side by side", "", (chart,))


def run_names(runs: Sequence[Run]) -> list[str]:
    """A short name for each run, numbered where two would be the same."""
    names = [model_name(run) for run in runs]
    return [f"{name} ({position + 1})" if names.count(name) > 1 else name for position, name in enumerate(names)]


def _lines(runs: Sequence[Run], names: Sequence[str], metric: str, site: str) -> list[tuple[str, Curve]]:
    found = []
    for run, name in zip(runs, names, strict=True):
        if metric in metrics_in_order(run.table):
            lines = lines_by_stack(run.table, metric, site)
            found += [(f"{name} {stack}".strip(), line) for stack, line in lines]
    return found
