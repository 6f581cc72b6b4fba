"""Every design of the map: predicted from its configuration, measured before training, trained, evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from transformers import BertForTokenClassification

from rankscope.ext.papers._spec import ExperimentSize, Settings
from rankscope.ext.papers.measuring.parts import RowRecorder, WorkPart, finished_run, measured_parts
from rankscope.ext.papers.training.baselines import one_answer_for_all, one_answer_per_position, one_answer_per_sequence
from rankscope.ext.papers.training.fitting import TrainingPlan, fit, share_right
from rankscope.ext.papers.training.networks import encoder_for
from rankscope.ext.papers.training.tasks import TrainingTask, sort_task
from rankscope.ext.papers.width_depth.show import RESIDUAL
from rankscope.ext.theory.designs import design_from_config
from rankscope.ext.theory.predict.run import SAMPLED, predict
from rankscope.runs.curves import names_in
from rankscope.runs.provenance import Provenance
from rankscope.runs.run import Run
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.exact.run import exact
from rankscope.verbs.origin import exact_floors

COORDINATES = ("source", "depth", "width", "heads", "gain", "std", "seed")
LAST = 10
"""Steps over which the loss is averaged at the end."""


@dataclass(frozen=True, order=True)
class MapCell:
    """One design of the map: a BERT with MLPs and LayerNorms after each sum, its skips scaled by ``gain``.

    Attributes:
        depth: number of blocks.
        width: of the residual stream; the MLPs are four times as wide.
        heads: per block.
        gain: of every skip, in training too.
        std: standard deviation of a weight at initialisation; by default 1/sqrt(width), which keeps the size of a token
            through a square matrix.
    """

    depth: int
    width: int
    heads: int
    gain: float
    std: float = 0.0

    def __post_init__(self) -> None:
        if self.std == 0.0:
            object.__setattr__(self, "std", float(self.width**-0.5))

    @property
    def name(self) -> str:
        """For messages and file names."""
        return f"depth{self.depth}-width{self.width}-heads{self.heads}-gain{self.gain:g}-std{self.std:.3g}"

    def at(self) -> dict[str, str | int | None]:
        """Its columns in a table."""
        names = {"gain": f"{self.gain:g}", "std": f"{self.std:.4g}"}
        return {"depth": self.depth, "width": self.width, "heads": self.heads, **names}


@dataclass(frozen=True, kw_only=True)
class MapSize(ExperimentSize):
    """How large the map is and how long each network is trained.

    Attributes:
        depths: of the designs at every width.
        deep: further depths, at the middle width only.
        widths: of the designs.
        heads: of the designs at every width.
        other_heads: also tried at the middle width, at the depths ``sliced``.
        other_stds: of weights, also tried at the middle width, at the depths ``sliced``.
        sliced: those depths.
        gains: of the skips.
        seeds: of weights, data and order of the data.
        steps: optimiser steps, the same for every network.
        drawn: seeds of a prediction.
        probed: sequences on which collapse is measured before training.
        learnt: training sequences.
        held: held-out sequences.
    """

    depths: tuple[int, ...] = (2, 4, 8)
    deep: tuple[int, ...] = (16,)
    widths: tuple[int, ...] = (32, 64, 128)
    heads: int = 4
    other_heads: tuple[int, ...] = (2,)
    other_stds: tuple[float, ...] = (0.02,)
    sliced: tuple[int, ...] = (2, 4)
    gains: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0)
    seeds: int = 2
    steps: int = 120
    drawn: int = 3
    probed: int = 2
    learnt: int = 1000
    held: int = 200

    def cells(self) -> Iterator[MapCell]:
        """Every design: all widths, then other weights, heads and depths at the middle width."""
        middle = self.widths[len(self.widths) // 2]
        for depth in self.depths:
            yield from (MapCell(depth, width, self.heads, gain) for width in self.widths for gain in self.gains)
        for depth in self.sliced:
            yield from (MapCell(depth, middle, self.heads, gain, std) for std in self.other_stds for gain in self.gains)
            yield from (MapCell(depth, middle, heads, gain) for heads in self.other_heads for gain in self.gains)
        yield from (MapCell(depth, middle, self.heads, gain) for depth in self.deep for gain in self.gains)


FULL = MapSize()
SMALL = MapSize(
    depths=(1, 4),
    deep=(),
    widths=(16,),
    heads=2,
    other_heads=(),
    other_stds=(),
    gains=(0.0, 1.0),
    seeds=1,
    steps=30,
    drawn=2,
    probed=1,
    learnt=200,
    held=50,
)


def measure(settings: Settings) -> Run:
    """The whole map."""
    size = settings.pick(FULL, SMALL)
    plan = TrainingPlan(steps=size.steps, rate=1e-3, warmup=0.1)
    decided = {name: getattr(size, name) for name in ("learnt", "held", "drawn", "probed")}
    parts = [
        WorkPart(
            f"{cell.name}-{'predicted' if seed is None else f'seed{seed}'}",
            {"cell": asdict(cell), "seed": seed, "size": decided, "plan": asdict(plan)},
            partial(_predict, cell, size) if seed is None else partial(_train, cell, seed, size, plan),
        )
        for cell in size.cells()
        for seed in (None, *range(size.seeds))
    ]
    tasks = [_task(size, seed) for seed in range(size.seeds)]
    pairs = [(task.train.labels, task.held.labels) for task in tasks]
    blind = {
        "symbol": float(np.mean([one_answer_for_all(*pair) for pair in pairs])),
        "position": float(np.mean([one_answer_per_position(*pair) for pair in pairs])),
        "sequence": float(np.mean([one_answer_per_sequence(held) for _, held in pairs])),
    }
    provenance = Provenance(
        model="BERT for the sort task",
        origin="init",
        seed=0,
        weights_dtype="float32",
        arithmetic_dtype="float32, exact before training",
        attention="sdpa",
        sequences=size.held,
        lengths=(tasks[0].tokens,) * size.held,
    )
    writer = measured_parts(settings, COORDINATES, parts, unit="part")
    facts: dict[str, Any] = {"size": size.to_json(), "plan": asdict(plan), "blind": blind, "small": settings.small}
    return finished_run(settings, writer, provenance, exact_floors("float32"), **facts)


def _task(size: MapSize, seed: int) -> TrainingTask:
    return sort_task(seed, train=size.learnt, held=size.held, fresh=True)


def _network(cell: MapCell, task: TrainingTask, seed: int) -> BertForTokenClassification:
    shape = {"layers": cell.depth, "heads": cell.heads, "width": cell.width, "mlp_width": 4 * cell.width}
    return encoder_for(task, **shape, std=cell.std, seed=seed)


def _after_last(cell: MapCell) -> dict[str, Any]:
    return {"site": "block.out", "layer": cell.depth - 1}


def _predict(cell: MapCell, size: MapSize, rows: RowRecorder) -> None:
    """What ``predict`` says about the design: the relative residual after its last block, sampled and by mean field."""
    design, _ = design_from_config(_network(cell, _task(size, 0), 0).config)
    run = predict(design, {"skip_gain": cell.gain}, seeds=size.drawn, most_blocks=cell.depth)
    last = _after_last(cell)
    for curve, source in ((SAMPLED, "predicted"), ("mean_field", "mean_field")):
        if curve in names_in(run.table, "curve"):
            values = run.select(metric=RESIDUAL, curve=curve, **last)["value"].to_pylist()
            rows.under(**cell.at(), source=source, seed=-1).add(RESIDUAL, values, **last)


def _train(cell: MapCell, seed: int, size: MapSize, plan: TrainingPlan, rows: RowRecorder) -> None:
    """Collapse of one network before training, and what training it for the plan's steps reaches."""
    task = _task(size, seed)
    model = _network(cell, task, seed)
    operation = None if cell.gain == 1.0 else Operation(attention_skip=cell.gain, mlp_skip=cell.gain)
    rows, last = rows.under(**cell.at(), seed=seed), _after_last(cell)
    before = exact(model, task.held.inputs["input_ids"][: size.probed], {"skip": cell.gain}, plain=False)
    residuals = before.select(metric=RESIDUAL, arithmetic="exact", **last)["value"].to_pylist()
    rows.add(RESIDUAL, residuals, **last, source="measured")
    done = fit(model, task, plan, seed=seed, operation=operation)
    with operating(model, operation or Operation()):
        accuracy = share_right(model, task.held)
    ends = {"accuracy": accuracy, "loss": float(np.mean(done.losses[-LAST:])), "seconds": done.seconds}
    for metric, value in ends.items():
        rows.add(metric, value, "model.out", layer=cell.depth - 1, source="trained")
