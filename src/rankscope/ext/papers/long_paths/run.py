"""Networks trained with reduced skips: can long paths carry the signal, and at what cost?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import torch

from rankscope.ext.papers._spec import ExperimentSize, Settings
from rankscope.ext.papers.long_paths.show import FALLING, FIXED
from rankscope.ext.papers.measuring.parts import RowRecorder, WorkPart, finished_run, measured_parts
from rankscope.ext.papers.training.fitting import TrainingPlan, as_batch, fit, share_right
from rankscope.ext.papers.training.networks import encoder_for
from rankscope.ext.papers.training.tasks import sort_task
from rankscope.ext.paths.decompose.run import decompose
from rankscope.models.inputs import Inputs
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import only
from rankscope.runs.run import Run
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.origin import floor_of

COORDINATES = ("schedule", "gain", "seed")
FALLS_UNTIL = 0.6
"""Share of the training after which the gain has reached its end."""


@dataclass(frozen=True, kw_only=True)
class LongPathsSize(ExperimentSize):
    """How much is run; ``gains`` are the final gains of the skips."""

    gains: tuple[float, ...]
    layers: int
    heads: int = 2
    width: int
    train: int
    held: int
    plan: TrainingPlan


FULL = LongPathsSize(
    gains=(1.0, 0.3, 0.1, 0.03, 0.01, 0.0),
    seeds=3,
    layers=6,
    width=48,
    train=1000,
    held=200,
    plan=TrainingPlan(steps=300, batch=100, rate=1e-3),
)
SMALL = LongPathsSize(
    gains=(1.0, 0.25, 0.0), seeds=1, layers=3, width=16, train=60, held=20, plan=TrainingPlan(steps=20, batch=20)
)


def gain_at(step: int, steps: int, end: float) -> float:
    """The gain of the skips while it falls: 1 at first, linear down to ``end`` at 60% of the steps, then ``end``.

    Example:
        >>> [gain_at(step, 100, 0.5) for step in (0, 30, 60, 90)]
        [1.0, 0.75, 0.5, 0.5]
    """
    return 1.0 + (end - 1.0) * min(1.0, step / (FALLS_UNTIL * steps))


def measure(settings: Settings) -> Run:
    """Every final gain, reached slowly and set from the start, several seeds."""
    size = settings.pick(FULL, SMALL)
    facts = {name: value for name, value in size.to_json().items() if name not in ("gains", "seeds")}
    arms = [(way, gain) for gain in size.gains for way in (FALLING, FIXED) if gain != 1.0 or way == FIXED]
    parts = [
        WorkPart(
            f"long-{schedule.replace(' ', '_')}-{gain:g}-{seed}",
            {"schedule": schedule, "gain": gain, "seed": seed, "version": 2, **facts},
            partial(measure_one, size, schedule, gain, seed),
        )
        for schedule, gain in arms
        for seed in range(size.seeds)
    ]
    provenance = Provenance(
        model="BertForTokenClassification trained on sort",
        origin="trained",
        seed=0,
        weights_dtype="float32",
        arithmetic_dtype="float32",
        sequences=size.held,
        operations=tuple({"schedule": schedule, "attention_skip": gain, "mlp": "drop"} for schedule, gain in arms),
    )
    writer = measured_parts(settings, COORDINATES, parts)
    return finished_run(settings, writer, provenance, floor_of({torch.float32}), small=settings.small, **size.to_json())


def measure_one(size: LongPathsSize, schedule: str, gain: float, seed: int, rows: RowRecorder) -> None:
    """Train one network; then its accuracy, and share, size and residual of every path length, means over sequences.

    Paths are those that start at the embedding; what biases contribute on the way is kept apart, as one share.
    """
    task = sort_task(seed, train=size.train, held=size.held)
    model = encoder_for(task, layers=size.layers, heads=size.heads, width=size.width, seed=seed)
    end, inputs = Operation(attention_skip=gain, mlp="drop"), as_batch(task.held).inputs

    def falling(step: int) -> Operation:
        return Operation(attention_skip=gain_at(step, size.plan.steps, gain), mlp="drop")

    done = fit(model, task, size.plan, seed=seed, operation=falling if schedule == FALLING else end)
    rows = rows.under(schedule=schedule, gain=f"{gain:g}", seed=seed)
    rows.add("final_loss", done.final_loss, "final")
    with operating(model, end, inputs=inputs):
        rows.add("accuracy", share_right(model, task.held), "final")
        table = decompose(model, Inputs(inputs, batch=len(task.held)), origins=True).table
    for metric in ("projection_share", "norm_share", "relative_residual"):
        for length, mean in _means(only(table, metric=metric, origin="embedding")).items():
            rows.add(metric, mean, "final", layer=length)
    from_biases = _means(only(table, metric="projection_share", origin="bias"))
    rows.add("projection_share_of_biases", math.fsum(from_biases.values()), "final")


def _means(rows: pa.Table) -> dict[int, float]:
    """Mean over sequences by length; lengths without a defined value are left out."""
    length, value = rows["length"].to_numpy(), rows["value"].to_numpy()
    by_length = {int(one): value[(length == one) & np.isfinite(value)] for one in np.unique(length)}
    return {one: float(here.mean()) for one, here in by_length.items() if here.size}
