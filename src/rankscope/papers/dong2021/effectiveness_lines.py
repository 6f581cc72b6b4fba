"""The rows of a path-effectiveness run, read as numbers over seeds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rankscope.papers._lines import has_line, select
from rankscope.papers.training.intervals import MeanInterval, mean_interval
from rankscope.runs.run import Run

LINES = (
    ("recomputed", "5"),
    ("recomputed", "20"),
    ("frozen", "5"),
    ("frozen", "20"),
    ("frozen", "all"),
    ("frozen, offset set right", "all"),
)


def lengths(run: Run) -> list[int]:
    """0 to the number of layers."""
    return list(range(int(run.extra["layers"]) + 1))


def by_seed(run: Run, metric: str, *, layer: int = 0, **where: str) -> list[float]:
    """One value per network, repeats averaged."""
    rows = select(run.table, {"metric": metric, "layer": layer, **where})
    seed, value = rows["seed"].to_numpy(), rows["value"].to_numpy()
    return [float(value[seed == one].mean()) for one in np.unique(seed)]


def over_seeds(run: Run, metric: str, *, layer: int = 0, **where: str) -> MeanInterval:
    """Mean and interval over networks."""
    return mean_interval(by_seed(run, metric, layer=layer, **where))


def curve(run: Run, metric: str, of: str, paths: str) -> list[MeanInterval]:
    """One line over path lengths."""
    return [over_seeds(run, metric, layer=length, of=of, paths=paths) for length in lengths(run)]


def guess(run: Run, of: str) -> MeanInterval | None:
    """One of the horizontal lines, if the task has it."""
    return over_seeds(run, "accuracy", of=of) if has_line(run.table, metric="accuracy", of=of) else None


def seeds(run: Run) -> int:
    """Networks trained."""
    return len(np.unique(run.table["seed"].to_numpy()))


def published_facts(task: str) -> Mapping[str, float]:
    """What the paper says of a task."""
    from rankscope.papers._published import published

    facts: Mapping[str, float] = published("dong2021_paths")["tasks"][task]
    return facts
