"""Every design of the map: predicted without weights, measured before training, trained, judged."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

import numpy as np
from tqdm.auto import tqdm
from transformers import BertForTokenClassification

from rankscope._types import Status
from rankscope.models.designs import design_from_config
from rankscope.papers._recipe import Settings
from rankscope.papers.measuring.answers import (
    one_answer_for_all,
    one_answer_per_position,
    one_answer_per_sequence,
)
from rankscope.papers.trainability.grid import COORDINATES, FULL, RESIDUAL, SMALL, Cell, Size
from rankscope.papers.training.fitting import Plan, fit, share_right
from rankscope.papers.training.keeping import written
from rankscope.papers.training.networks import encoder_for
from rankscope.papers.training.tasks import Task, sort_task
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import STATUS_CODE, RowWriter
from rankscope.runs.run import Run
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.exact.run import exact
from rankscope.verbs.origin import exact_floors
from rankscope.verbs.predict.run import SAMPLED, predict

LAST = 10
"""Steps over which the loss is averaged at the end."""


def measure_map(settings: Settings) -> Run:
    """The whole map; parts that were kept are not made again."""
    size = SMALL if settings.small else FULL
    size = size if settings.seeds is None else replace(size, seeds=settings.seeds)
    plan = Plan(steps=size.steps, rate=1e-3, warmup=0.1)
    writer = RowWriter(coordinates=COORDINATES)
    todo = [(cell, seed) for cell in size.cells() for seed in (None, *range(size.seeds))]
    for cell, seed in tqdm(todo, desc="width-depth", unit="part", disable=not settings.progress):
        facts = {"cell": asdict(cell), "seed": seed, "size": _data(size), "plan": asdict(plan)}
        name = f"{cell.name}-{'predicted' if seed is None else f'seed{seed}'}"
        written(writer, settings.keep, name, facts, partial(_make, cell, seed, size, plan))
    task = _task(size, 0)
    return Run(
        kind="reproduce:width-depth",
        provenance=Provenance(
            model="BERT for the sort task",
            origin="init",
            seed=0,
            weights_dtype="float32",
            arithmetic_dtype="float32, exact before training",
            attention="sdpa",
            sequences=size.held,
            lengths=(task.tokens,) * size.held,
        ),
        floor=exact_floors("float32"),
        verdict="",
        table=writer.table(),
        extra={"size": size.to_json(), "plan": asdict(plan), "blind": blind_accuracy(size), "small": settings.small},
    )


def blind_accuracy(size: Size) -> dict[str, float]:
    """What is right with one answer for all tokens, one for each position, or the best one for each sequence."""
    tasks = [_task(size, seed) for seed in range(size.seeds)]
    return {
        "symbol": float(np.mean([one_answer_for_all(t.train.labels, t.held.labels) for t in tasks])),
        "position": float(np.mean([one_answer_per_position(t.train.labels, t.held.labels) for t in tasks])),
        "sequence": float(np.mean([one_answer_per_sequence(t.held.labels) for t in tasks])),
    }


def _data(size: Size) -> dict[str, int]:
    return {"learnt": size.learnt, "held": size.held, "drawn": size.drawn, "probed": size.probed}


def _task(size: Size, seed: int) -> Task:
    return sort_task(seed, train=size.learnt, held=size.held, fresh=True)


def _network(cell: Cell, task: Task, seed: int) -> BertForTokenClassification:
    return encoder_for(
        task,
        layers=cell.depth,
        heads=cell.heads,
        width=cell.width,
        mlp_width=4 * cell.width,
        std=cell.std,
        seed=seed,
    )


def _make(cell: Cell, seed: int | None, size: Size, plan: Plan, writer: RowWriter) -> None:
    if seed is None:
        write_predicted(cell, size, writer)
    else:
        write_trained(cell, seed, size, plan, writer)


def write_predicted(cell: Cell, size: Size, writer: RowWriter) -> None:
    """What ``predict`` says of the design: the relative residual after its last block, drawn and by the mean field."""
    config = _network(cell, _task(size, 0), 0).config
    design, _ = design_from_config(config)
    run = predict(design, {"skip_gain": cell.gain}, seeds=size.drawn, most_blocks=cell.depth)
    rows = run.select(metric=RESIDUAL, site="block.out", layer=cell.depth - 1)
    for curve, source in ((SAMPLED, "predicted"), ("mean_field", "mean_field")):
        values = [row["value"] for row in rows.to_pylist() if row["curve"] == curve]
        if values:
            _add(writer, cell, RESIDUAL, values, source, None)


def write_trained(cell: Cell, seed: int, size: Size, plan: Plan, writer: RowWriter) -> None:
    """Collapse of one network before training, and what training it for the plan's steps reaches."""
    task = _task(size, seed)
    model = _network(cell, task, seed)
    operation = None if cell.gain == 1.0 else Operation(attention_skip=cell.gain, mlp_skip=cell.gain)
    probe = task.held.inputs["input_ids"][: size.probed]
    before = exact(model, probe, skip=cell.gain, plain=False)
    rows = before.select(metric=RESIDUAL, site="block.out", layer=cell.depth - 1)
    values = [row["value"] for row in rows.to_pylist() if row["arithmetic"] == "exact"]
    _add(writer, cell, RESIDUAL, values, "measured", seed)
    done = fit(model, task, plan, seed=seed, operation=operation)
    with operating(model, operation or Operation()):
        _add(writer, cell, "accuracy", [share_right(model, task.held)], "trained", seed)
    _add(writer, cell, "loss", [float(np.mean(done.losses[-LAST:]))], "trained", seed)
    _add(writer, cell, "seconds", [done.seconds], "trained", seed)


def _add(writer: RowWriter, cell: Cell, metric: str, values: list[float], source: str, seed: int | None) -> None:
    numbers = np.array(values, dtype=np.float64)
    writer.add(
        metric=metric,
        site="block.out" if metric == RESIDUAL else "model.out",
        stack=None,
        layer=cell.depth - 1,
        first_sequence=0,
        values=numbers,
        statuses=np.where(np.isfinite(numbers), STATUS_CODE[Status.OK], STATUS_CODE[Status.NOT_FINITE]),
        head_axis=False,
        at={**cell.at(), "source": source, "seed": -1 if seed is None else seed},
    )
