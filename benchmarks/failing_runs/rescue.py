"""Do what the alarm of a stored run says, literally, and compare the final loss with doing nothing and with no fault.

::

    python -m benchmarks.failing_runs.rescue --keep RUNS --seeds 3 --set last --out docs/data/monitor/rescue.json

The run is trained again, without a gauge, up to the first alarm that recognised its fault. Checkpoints are kept every
eight steps. Then one of these is done:

- "Return to", "Reload" or "Restart from a checkpoint before it": the last checkpoint before the step that the alarm
  names is loaded, and training goes on from there. A learning rate that is named becomes the largest one.
- "Look at ...", "Look for ...", "Check ..." and "Compare ...": if the cause that the alarm names is where the fault is,
  it is found and removed. If it is elsewhere, nothing is found, and nothing changes. Without a checkpoint that is to be
  loaded, training goes on with the weights as they are.
- "Initialise ...": training goes on at this step with the weights of the run without the fault before its first step.
- None of these: there is no suggestion.

An alarm may say both. A fault that overwrites weights once does not happen again after a checkpoint was loaded; every
other fault that is not removed goes on. The loss is that of the undisturbed objective on held-out batches, at the last
step.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.failing_runs.declared import SETS, Declared
from benchmarks.failing_runs.evaluating import Stored, stored
from benchmarks.failing_runs.training import FAULTS, Training, advance
from rankscope.monitor import Alarm

EVERY = 8
MARGIN = 0.02
"""Difference of two losses, in nats, that counts; chosen before the runs."""
BATCHES = 8
ONCE = frozenset(
    {"no gains", "large embedding", "one embedding", "times four", "nan head", "reversed blocks", "reset block",
     "reset half", "new head", "large gain", "no positions", "shifted embedding", "first checkpoint", "five times",
     "nan row", "infinite gain", "one weight", "other mlps", "wrong split", "constant", "copies",
     "transposed", "zero adapters", "fresh attention", "wide rows", "gains and biases"}
)  # fmt: skip
"""Faults that overwrite weights at one step."""
GOOD_RATE = {True: 0.02, False: 1e-3}
"""Learning rate of the run without a fault, with momentum and with AdamW."""
INITIALISES = "Initialise "
LOADS = ("Return to a checkpoint", "Reload the weights", "Restart from a checkpoint")
LOOKS = (
    "Look at",
    "Look for",
    "look at its scale",
    "Check that",
    "Compare the",
    "Compare what",
    "compare code",
    "Keep the weights in float32",
    "Print some inputs with their labels",
    "Give answers and targets the same shape",
    "Raise the learning rate",
)


@dataclass
class Checkpoint:
    """Everything a training needs to go on from a step."""

    step: int
    weights: Mapping[str, Any]
    classes: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    random: torch.Tensor

    @classmethod
    def of(cls, training: Training, step: int) -> Checkpoint:
        """A copy of the state before a step."""
        parts = (training.model, training.classes, training.optimizer)
        return cls(step, *copy.deepcopy([part.state_dict() for part in parts]), training.generator.get_state())

    def load(self, training: Training, *, weights: Mapping[str, Any] | None = None) -> None:
        """Continue from here, perhaps with other weights. Settings of the optimizer stay those of the training."""
        training.model.load_state_dict(self.weights if weights is None else weights)
        training.classes.load_state_dict(self.classes)
        settings = [{k: v for k, v in group.items() if k != "params"} for group in training.optimizer.param_groups]
        training.optimizer.load_state_dict(copy.deepcopy(dict(self.optimizer)))
        for group, own in zip(training.optimizer.param_groups, settings, strict=True):
            group.update(own)
        training.generator.set_state(self.random)


def train(
    training: Training, start: int, stop: int, *, faulty: bool, most: float = math.inf, again: bool = True
) -> list[Checkpoint]:
    """Train from one step to another; the checkpoints, the last one at the end.

    Args:
        training: the run.
        start: first step.
        stop: step that is not made.
        faulty: whether the fault acts.
        most: largest learning rate.
        again: whether a fault that overwrites weights once may do so.
    """
    declared, kept = training.declared, []
    for step in range(start, stop):
        if step % EVERY == 0:
            kept.append(Checkpoint.of(training, step))
        acts = faulty and step >= declared.sets_in and (again or declared.fault not in ONCE)
        if acts and declared.fault is not None:
            FAULTS[declared.fault](training, step - declared.sets_in)
        if training.learning_rate(step) > most:
            training.rate *= most / training.learning_rate(step)
        advance(training, None, step)
    return [*kept, Checkpoint.of(training, stop)]


def held_out_loss(training: Training) -> float:
    """Loss of the undisturbed objective on batches that were not trained on; infinite if it is not a number."""
    clean = Training(replace(training.declared, fault=None), 0, "tiny")
    clean.model, clean.classes, clean.text = training.model, training.classes, training.held_out
    clean.generator.manual_seed(12_345)
    training.model.eval()
    with torch.no_grad():
        losses = [float(clean.loss(clean.batch(0))) for _ in range(BATCHES)]
    found = math.fsum(losses) / BATCHES
    return found if math.isfinite(found) else math.inf


def healthy(declared: Declared) -> Declared:
    """The run without its fault."""
    if declared.fault == "none" and declared.components == ("rate",):
        return replace(declared, fault=None, rate=GOOD_RATE["sgd" in declared.options])
    return replace(declared, fault=None)


def told(run: Stored) -> Alarm | None:
    """The first alarm that recognised the fault."""
    raised = [alarm for alarm in run.record.alarms if alarm.state == "raised" and alarm.step >= run.declared.sets_in]
    return next((alarm for alarm in raised if alarm.name in run.declared.right), None)


def suggestion(sentence: str) -> str:
    """What the alarm says to do; empty if it suggests nothing."""
    places = [sentence.find(words) for words in (*LOADS, *LOOKS, INITIALISES) if words in sentence]
    return sentence[min(places) :] if places else ""


def rescued(run: Stored, alarm: Alarm, before: Sequence[Checkpoint], steps: int) -> Training:
    """Do what the alarm says, from its step to the end."""
    declared, said, now = run.declared, suggestion(alarm.sentence), before[-1]
    named = re.search(r"(?:at|to|from) step (\d+)", alarm.sentence.split("Cause", 1)[-1])
    since = min(int(named[1]) if named else alarm.step, alarm.step)
    checkpoint = max((one for one in before if one.step <= max(since - 1, 0)), key=lambda one: one.step)
    found = alarm.component in declared.components and any(words in said for words in LOOKS)
    loads = any(words in said for words in LOADS)
    training = Training(healthy(declared) if found else declared, run.seed, "tiny")
    start = checkpoint if loads else now
    if not found and declared.fault is not None and declared.fault not in ONCE and start.step > declared.sets_in:
        FAULTS[declared.fault](training, 0)  # what it puts into the model at its first step is still there
    start.load(training)
    if INITIALISES in said:
        begin = Training(healthy(declared), run.seed, "tiny")
        training.model.load_state_dict(begin.model.state_dict())
        training.classes.load_state_dict(begin.classes.state_dict())
        training.optimizer.load_state_dict(begin.optimizer.state_dict())
    rate = re.search(r"learning rate to about ([\d.e+-]+)", said)
    train(
        training,
        start.step,
        steps,
        faulty=not found,
        again=False,
        most=float(rate[1].rstrip(".,")) if rate else math.inf,
    )
    return training


def facts_of(run: Stored) -> dict[str, Any] | None:
    """Losses with nothing done, with what the alarm says, and without the fault; None if nothing is suggested."""
    alarm = told(run)
    if alarm is None or not suggestion(alarm.sentence):
        return None
    declared, steps = run.declared, len(run.steps["loss"])
    faulty = Training(declared, run.seed, "tiny")
    before = train(faulty, 0, alarm.step + 1, faulty=True)
    train(faulty, alarm.step + 1, steps, faulty=True)
    oracle = Training(healthy(declared), run.seed, "tiny")
    train(oracle, 0, steps, faulty=False)
    losses: dict[str, float] = {
        "nothing": held_out_loss(faulty),
        "told": held_out_loss(rescued(run, alarm, before, steps)),
        "oracle": held_out_loss(oracle),
    }
    return {
        "name": declared.name,
        "seed": run.seed,
        "step": alarm.step,
        "cause": alarm.component,
        "said": suggestion(alarm.sentence),
        "losses": {name: loss if math.isfinite(loss) else None for name, loss in losses.items()},
        "improved": losses["told"] < losses["nothing"] - MARGIN,
        "costs": losses["nothing"] > losses["oracle"] + MARGIN,
        "worse": losses["told"] > losses["nothing"] + MARGIN,
    }


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The table of the documentation."""
    better, worse = sum(run["improved"] for run in runs), sum(run["worse"] for run in runs)
    costly = [run for run in runs if run["costs"]]
    lines = [
        f"{better} of {len(runs)} runs with a suggestion ended with a lower loss than without it (by more than "
        f"{MARGIN}), {worse} with a higher one. In {len(costly)} of them the fault costs more than that, and "
        f"{sum(run['improved'] for run in costly)} of these improved.",
        "",
        "| fault | seed | alarm at step | cause | what it says | nothing done | as told | without the fault |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        losses = [run["losses"][name] for name in ("nothing", "told", "oracle")]
        numbers = ["NaN" if loss is None else f"{loss:.2f}" for loss in losses]
        cells = [run["name"], run["seed"], run["step"], run["cause"], run["said"], *numbers]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rescue the stored runs of a set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, required=True, help="folder of the runs, trained with --live")
    parser.add_argument("--seeds", type=int, nargs="+", help="all that are stored, if not given")
    parser.add_argument("--set", choices=SETS, default="last")
    parser.add_argument("--only", nargs="+", help="names of runs; what is recorded of the others stays")
    parser.add_argument("--out", type=Path, help="file for the numbers; the table is written beside it (.inc)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = {declared.name for declared in SETS[options.set] if declared.fault is not None}
    found: list[dict[str, Any]] = []
    if options.only:
        names &= set(options.only)
        earlier = json.loads(options.out.read_text())["runs"] if options.out is not None else []
        found = [facts for facts in earlier if facts["name"] not in names]
    for run in stored(options.keep, "tiny", options.seeds):
        facts = facts_of(run) if run.declared.name in names else None
        if facts is not None:
            found.append(facts)
            print(json.dumps(facts), flush=True)
    print(page(found))
    if options.out is not None:
        options.out.write_text(json.dumps({"date": date.today().isoformat(), "runs": found}, indent=1) + "\n")
        options.out.with_suffix(".inc").write_text(page(found))


if __name__ == "__main__":
    main()
