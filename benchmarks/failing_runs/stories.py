"""Draw stored runs beside their healthy twins: loss, the value that raised the alarm, and the step of the alarm.

::

    python -m benchmarks.failing_runs.stories --keep RUNS --seed 5

writes ``docs/data/monitor/stories.json`` and one figure per story to ``docs/_static/figures/monitor``.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.failing_runs.evaluating import WINDOW, Stored, stored

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "data" / "monitor" / "stories.json"
FIGURES = ROOT / "docs" / "_static" / "figures" / "monitor"
FAULTY, HEALTHY = "#c0392b", "#2c6e9b"


@dataclass(frozen=True)
class Story:
    """A fault beside the run that differs from it in nothing else.

    Attributes:
        faulty: name of the run that goes wrong.
        healthy: name of its twin.
        metric: what the alarm is raised on.
        label: of the vertical axis.
    """

    faulty: str
    healthy: str
    metric: str
    label: str


STORIES = {
    "siamese": Story(
        "siamese, no stop-gradient",
        "siamese, stop-gradient",
        "inputs_relative_residual",
        "residual between inputs\n(last block)",
    ),
}


def facts(run: Stored, metric: str) -> dict[str, Any]:
    """What the figure shows of one run: the loss, smoothed, and the metric in one block."""
    losses = run.steps["loss"]
    layer = max(run.record.readings[0].values(metric))
    read = {reading.step: reading.values(metric).get(layer, math.nan) for reading in run.record.readings}
    return {
        "name": run.declared.name,
        "seed": run.seed,
        "sets_in": run.declared.sets_in if run.declared.fault is not None else None,
        "loss": {
            step: round(math.fsum(losses[step + 1 - WINDOW : step + 1]) / WINDOW, 4)
            for step in range(WINDOW - 1, len(losses))
        },
        metric: {step: float(f"{value:.4g}") for step, value in read.items() if math.isfinite(value)},
        "alarms": [
            {"name": alarm.name, "step": alarm.step, "component": alarm.component, "sentence": alarm.sentence}
            for alarm in run.record.alarms
            if alarm.state == "raised"
        ],
    }


def draw(name: str, story: Story, faulty: dict[str, Any], healthy: dict[str, Any]) -> None:
    """Two panels that share their steps."""
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 5.6), layout="constrained", sharex=True)
    for run, color, label in ((healthy, HEALTHY, "healthy twin"), (faulty, FAULTY, "faulty run")):
        above.plot(list(run["loss"]), list(run["loss"].values()), color=color, lw=1.8, label=label)
        below.plot(list(run[story.metric]), list(run[story.metric].values()), color=color, lw=1.8)
    alarm = faulty["alarms"][0]
    for axis in (above, below):
        axis.axvline(alarm["step"], color="#222222", lw=1.2, ls="--", label=f"alarm, step {alarm['step']}")
        if faulty["sets_in"]:
            axis.axvline(faulty["sets_in"], color="#888888", lw=1.2, ls=":", label=f"fault, step {faulty['sets_in']}")
    above.set_ylabel(f"loss (mean of {WINDOW} steps)")
    below.set(yscale="log", ylabel=story.label, xlabel="step")
    above.legend(frameon=False, fontsize=9)
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"story-{name}.png", dpi=120)
    plt.close(figure)


def main() -> int:
    """Read the stored runs, write the numbers, draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failing_runs.stories", description=__doc__)
    parser.add_argument("--keep", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    runs = {run.declared.name: run for run in stored(options.keep, "tiny", [options.seed])}
    told: dict[str, Any] = {"date": date.today().isoformat()}
    for name, story in STORIES.items():
        told[name] = [facts(runs[one], story.metric) for one in (story.faulty, story.healthy)]
        draw(name, story, *told[name])
    DATA.write_text(json.dumps(told, indent=None) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
