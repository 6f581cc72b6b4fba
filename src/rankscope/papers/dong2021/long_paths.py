"""Networks whose skips are turned down while they learn: can long paths be made to carry the signal, at what cost?"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn
from tqdm.auto import tqdm

from rankscope.papers._lines import select
from rankscope.papers._recipe import Settings
from rankscope.papers.training.fitting import Plan, as_batch, fit, share_right
from rankscope.papers.training.keeping import Row, kept, write_rows
from rankscope.papers.training.networks import encoder_for
from rankscope.papers.training.tasks import Task, sort_task
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.decompose.run import decompose
from rankscope.verbs.origin import floor_of

LOSS, ACCURACY = "final_loss", "accuracy"
SHARE, NORM, RESIDUAL, BIASES = "projection_share", "norm_share", "relative_residual", "projection_share_of_biases"
COORDINATES = ("schedule", "gain", "seed")
FALLING, FIXED = "falling", "from the start"
FALLS_UNTIL = 0.6
"""Share of the training after which the gain has come to its end."""


@dataclass(frozen=True)
class Size:
    """How much is run."""

    gains: tuple[float, ...]
    seeds: int
    layers: int
    heads: int
    width: int
    train: int
    held: int
    plan: Plan

    def facts(self) -> dict[str, Any]:
        """What one network depends on."""
        return {name: value for name, value in asdict(self).items() if name not in ("gains", "seeds")}


FULL = Size((1.0, 0.3, 0.1, 0.03, 0.01, 0.0), 3, 6, 2, 48, 1000, 200, Plan(steps=300, batch=100, rate=1e-3))
SMALL = Size((1.0, 0.25, 0.0), 1, 3, 2, 16, 60, 20, Plan(steps=20, batch=20))


def gain_at(step: int, steps: int, end: float) -> float:
    """The skip's gain while it falls: 1 at first, straight down to ``end`` at 60% of the steps, then ``end``.

    Example:
        >>> [gain_at(step, 100, 0.5) for step in (0, 30, 60, 90)]
        [1.0, 0.75, 0.5, 0.5]
    """
    return 1.0 + (end - 1.0) * min(1.0, step / (FALLS_UNTIL * steps))


def measure_long_paths(settings: Settings) -> Run:
    """Every end of the gain, reached slowly and set from the start, several seeds."""
    size = SMALL if settings.small else FULL
    seeds = settings.seeds or size.seeds
    writer = RowWriter(coordinates=COORDINATES)
    arms = [
        (schedule, gain) for gain in size.gains for schedule in (FALLING, FIXED) if gain != 1.0 or schedule == FIXED
    ]
    work = [(schedule, gain, seed) for schedule, gain in arms for seed in range(seeds)]
    for schedule, gain, seed in tqdm(work, desc="long-paths", unit="network", disable=not settings.progress):
        facts = {"schedule": schedule, "gain": gain, "seed": seed, "version": 1, **size.facts()}
        piece = f"long-{schedule.replace(' ', '_')}-{gain:g}-{seed}"
        write_rows(writer, kept(settings.keep, piece, facts, partial(one, size, schedule, gain, seed)), "final")
    return Run(
        kind="reproduce:long-paths",
        provenance=Provenance(
            model="BertForTokenClassification trained on sort",
            origin="trained",
            seed=0,
            weights_dtype="float32",
            arithmetic_dtype="float32",
            sequences=size.held,
            operations=tuple({"schedule": schedule, "attention_skip": gain, "mlp": "drop"} for schedule, gain in arms),
        ),
        floor=floor_of({torch.float32}),
        verdict="",
        table=writer.table(),
        extra={"small": settings.small, "seeds": seeds, **asdict(size)},
    )


def one(size: Size, schedule: str, gain: float, seed: int) -> list[Row]:
    """Train one network and take it apart."""
    task = sort_task(seed, train=size.train, held=size.held)
    model = encoder_for(task, layers=size.layers, heads=size.heads, width=size.width, seed=seed)
    end = Operation(attention_skip=gain, mlp="drop")

    def falling(step: int) -> Operation:
        return Operation(attention_skip=gain_at(step, size.plan.steps, gain), mlp="drop")

    how = fit(model, task, size.plan, seed=seed, operation=falling if schedule == FALLING else end)
    rows: list[Row] = [
        {"metric": LOSS, "layer": 0, "value": how.final_loss},
        *_taken_apart(model, task, end),
    ]
    return [{**row, "schedule": schedule, "gain": f"{gain:g}", "seed": seed} for row in rows]


def _taken_apart(model: nn.Module, task: Task, operation: Operation) -> list[Row]:
    """Accuracy on unseen sequences, and share, size and residual of every path length, means over them.

    Paths are those that start at the embedding; what biases bring in on the way is kept apart, as one share.
    """
    inputs = as_batch(task.held).inputs
    with operating(model, operation, inputs=inputs):
        rows: list[Row] = [{"metric": ACCURACY, "layer": 0, "value": share_right(model, task.held)}]
        table = decompose(model, inputs, batch=len(task.held), origins=True).table
    for metric in (SHARE, NORM, RESIDUAL):
        for length, mean in _means(select(table, {"metric": metric, "origin": "embedding"})).items():
            rows.append({"metric": metric, "layer": length, "value": mean})
    from_biases = _means(select(table, {"metric": SHARE, "origin": "bias"}))
    rows.append({"metric": BIASES, "layer": 0, "value": math.fsum(from_biases.values())})
    return rows


def _means(rows: pa.Table) -> dict[int, float]:
    """Mean over sequences by length; lengths without a defined value are left out."""
    length, value = rows["length"].to_numpy(), rows["value"].to_numpy()
    found = {int(one): value[(length == one) & np.isfinite(value)] for one in np.unique(length)}
    return {one: float(here.mean()) for one, here in found.items() if here.size}
