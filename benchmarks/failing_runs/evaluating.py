"""Evaluate detectors on stored runs: which alarm at which step, how long before the loss shows it, false alarms."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.failing_runs.declared import RUNS, Declared
from benchmarks.failing_runs.training import DONE
from rankscope.monitor import Record, read_record
from rankscope.monitor.watching import AlarmWatch, References, chosen_alarms

WINDOW, RISE = 20, 0.05
"""The loss shows a fault when its mean over so many steps is this much above the lowest so far, or not finite."""


@dataclass(frozen=True)
class Stored:
    """One stored run.

    Attributes:
        declared: what it is.
        seed: of weights and data.
        steps: loss and gradient norm by step, RankMe by reading.
        record: the gauge's.
    """

    declared: Declared
    seed: int
    steps: Mapping[str, Any]
    record: Record


Alarms = list[tuple[str, int]]
"""Name and step of every alarm that was raised."""


def stored(keep: Path, size: str, seeds: Sequence[int] | None) -> Iterator[Stored]:
    """The finished runs, in the order of their declarations."""
    found = {}
    for path in sorted((keep / size).glob(f"*/*/{DONE}")):
        steps = json.loads(path.read_text())
        if seeds is None or steps["seed"] in seeds:
            found[steps["name"], steps["seed"]] = Stored(
                RUNS[steps["name"]], steps["seed"], steps, read_record(path.parent)
            )
    order = list(RUNS)
    yield from sorted(found.values(), key=lambda run: (order.index(run.declared.name), run.seed))


def gauge(run: Stored) -> Alarms:
    """The gauge's own alarms, from its readings."""
    references, watch = References(), AlarmWatch(chosen_alarms(None))
    found: Alarms = []
    for reading in run.record.readings:
        references.take(reading.table)
        states = references.states(reading.table)
        alarms = watch.look(reading.step, states, lambda *of: ("", ""))
        found += [(alarm.name, alarm.step) for alarm in alarms if alarm.state == "raised"]
    return found


def loss_rises(run: Stored) -> Alarms:
    """The smoothed loss rises, or a loss is not finite."""
    lowest, losses = math.inf, run.steps["loss"]
    for step, loss in enumerate(losses):
        if loss is None or not math.isfinite(loss):
            return [("loss", step)]
        if step + 1 >= WINDOW:
            smooth = math.fsum(losses[step + 1 - WINDOW : step + 1]) / WINDOW
            if smooth > lowest + RISE * abs(lowest):
                return [("loss", step)]
            lowest = min(lowest, smooth)
    return []


def gradient_spike(run: Stored) -> Alarms:
    """The norm of the gradient is three times the median of the last fifty steps, or not finite."""
    norms = run.steps["gradient_norm"]
    for step in range(10, len(norms)):
        if not math.isfinite(norms[step]) or norms[step] > 3.0 * median(norms[max(0, step - 50) : step]):
            return [("gradient norm", step)]
    return []


def cosine_by_hand(run: Stored) -> Alarms:
    """The mean cosine of the last block is above 0.9."""
    for reading in run.record.readings:
        cosines = reading.values("mean_cosine")
        if cosines and cosines[max(cosines)] > 0.9:
            return [("mean cosine", reading.step)]
    return []


def rankme_falls(run: Stored) -> Alarms:
    """RankMe of a held-out batch falls to half of its largest value so far."""
    largest = 0.0
    for step, value in run.steps["rankme"]:
        if not math.isfinite(value) or value < 0.5 * largest:
            return [("RankMe", step)]
        largest = max(largest, value)
    return []


DETECTORS: dict[str, Callable[[Stored], Alarms]] = {
    "gauge": gauge,
    "loss rises": loss_rises,
    "gradient spike": gradient_spike,
    "mean cosine": cosine_by_hand,
    "RankMe falls": rankme_falls,
}


def first_after(alarms: Alarms, onset: int) -> int | None:
    """The step of the first alarm from the onset on."""
    return min((step for _, step in alarms if step >= onset), default=None)


def facts_of(run: Stored) -> dict[str, Any]:
    """What every detector said about one run."""
    declared, found = run.declared, {name: detect(run) for name, detect in DETECTORS.items()}
    onset = declared.sets_in if declared.fault is not None else 0
    live = [alarm for alarm in run.record.alarms if alarm.state == "raised" and alarm.step >= onset]
    recognised = [alarm for alarm in live if alarm.name in declared.right]
    cause = run.steps.get("why")
    return {
        "name": declared.name,
        "seed": run.seed,
        "faulty": declared.fault is not None,
        "kind": declared.kind,
        "sets_in": onset,
        "readings": len(run.record.readings),
        "alarms": [[name, step] for name, step in found["gauge"]],
        "before_onset": sum(step < onset for _, step in found["gauge"]),
        "readings_before": sum(reading.step < onset for reading in run.record.readings),
        "right": any(name in declared.right for name, step in found["gauge"] if step >= onset),
        "components": list(declared.components),
        "cause": None if cause is None else class_of(cause["component"]),
        "sentence": recognised[0].sentence if recognised else None,
        "first": {name: first_after(alarms, onset) for name, alarms in found.items()},
    }


def class_of(component: str) -> str:
    """Weights, data, code, objective, optimizer or initialisation; numbers and gradients are symptoms of any."""
    classes = {
        "code": ("structure", "skip", "attention", "mlp", "branches", "head", "norm", "position", "dropout", "shapes"),
        "optimizer": ("rate", "optimizer"),
        "objective": ("objective", "loss"),
        "weights": ("weights", "embedding", "adapters"),
    }
    return next((name for name, components in classes.items() if component in components), component)


def upper_limit(count: int, trials: int) -> float:
    """Upper end of the two-sided 95% interval of a rate (Clopper and Pearson, 1934)."""
    from scipy.stats import beta

    return 1.0 if count >= trials else float(beta.ppf(0.975, count + 1, trials - count))


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Detection, lead, causes, and false alarms of each detector."""
    faulty, healthy = [run for run in runs if run["faulty"]], [run for run in runs if not run["faulty"]]
    found: dict[str, Any] = {"faulty_runs": len(faulty), "healthy_runs": len(healthy), "detectors": {}}
    readings = sum(run["readings"] for run in healthy)
    for name in DETECTORS:
        leads = [
            run["first"]["loss rises"] - run["first"][name]
            for run in faulty
            if run["first"][name] is not None and run["first"]["loss rises"] is not None
        ]
        found["detectors"][name] = {
            "detected": sum(run["first"][name] is not None for run in faulty),
            "detected_representation": sum(
                run["first"][name] is not None for run in faulty if run["kind"] == "representation"
            ),
            "median_lead_over_loss": median(leads) if leads else None,
            "healthy_runs_alarmed": sum(run["first"][name] is not None for run in healthy),
        }
    false = sum(len(run["alarms"]) for run in healthy) + sum(run["before_onset"] for run in faulty)
    readings += sum(run["readings_before"] for run in faulty)
    named = [run for run in faulty if run["cause"] is not None]
    right = [run for run in named if run["cause"] in map(class_of, run["components"] or ["unknown"])]
    of_kind = [run for run in faulty if run["kind"] == "representation"]
    found["gauge"] = {
        "representation": {"runs": len(of_kind), "recognised": sum(run["right"] for run in of_kind)},
        "recognised": sum(run["right"] for run in faulty),
        "false_alarms": false,
        "healthy_readings": readings,
        "false_alarms_per_reading_at_most": upper_limit(false, readings) if readings else None,
        "causes_named": len(named),
        "causes_right": len(right),
        "causes_not_found": sum(run["cause"] == "unknown" for run in named),
    }
    return found


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """The runs as Markdown, one row each."""
    lines = ["| run | affects | seed | alarm | step | loss shows it | cause |", "|---|---|---|---|---|---|---|"]
    for run in runs:
        name, step = next(((n, s) for n, s in run["alarms"] if s >= run["sets_in"]), ("none", ""))
        loss = run["first"]["loss rises"]
        mark = "" if not run["faulty"] or run["right"] else " (not the right one)" if name != "none" else " (missed)"
        cells = [
            run["name"],
            run["kind"],
            run["seed"],
            name.replace("_", " ") + mark,
            step,
            "" if loss is None else loss,
        ]
        lines.append("| " + " | ".join(map(str, [*cells, run["cause"] or ""])) + " |")
    return "\n".join(lines)


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The tables of the documentation: detectors beside each other, then every fault."""
    found = summary(runs)
    of_kind = found["gauge"]["representation"]["runs"]
    lines = [
        "| detector | faults detected | of those that affect the representation | median lead over the loss, steps "
        "| healthy runs with an alarm |",
        "|---|---|---|---|---|",
    ]
    for name, facts in found["detectors"].items():
        lead = facts["median_lead_over_loss"]
        cells = [
            name,
            f"{facts['detected']} of {found['faulty_runs']}",
            f"{facts['detected_representation']} of {of_kind}",
            "" if lead is None else f"{lead:g}",
            f"{facts['healthy_runs_alarmed']} of {found['healthy_runs']}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    own = found["gauge"]
    lines += [
        "",
        f"The gauge named a cause in {own['causes_named'] - own['causes_not_found']} of {own['causes_named']} "
        f"recognised faults, {own['causes_right']} of {own['causes_named']} answers were right, "
        f'{own["causes_not_found"]} "not found". False alarms: {own["false_alarms"]} in '
        f"{own['healthy_readings']:,} healthy readings: at most "
        f"{own['false_alarms_per_reading_at_most']:.1e} per reading (95%, Clopper and Pearson).",
        "",
        table([run for run in runs if run["faulty"]]),
    ]
    return "\n".join(lines) + "\n"
