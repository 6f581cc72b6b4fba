"""Every network trained and watched, over seeds."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

import numpy as np
from tqdm.auto import tqdm

from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.papers._recipe import Settings
from rankscope.papers.dynamics.arms import COORDINATES, FULL, SMALL, VARIANTS, Arm, Size
from rankscope.papers.dynamics.networks import network_for, probe_of, task_for
from rankscope.papers.dynamics.watching import Watcher
from rankscope.papers.measuring.answers import one_answer_per_sequence
from rankscope.papers.training.fitting import Plan, fit, share_right
from rankscope.papers.training.keeping import written
from rankscope.papers.training.tasks import sort_task
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.viewing import view_of
from rankscope.surgery.operating import operating
from rankscope.verbs.origin import exact_floors

LAST = 10
"""Steps over which the loss is averaged at the end."""


def measure_training(settings: Settings) -> Run:
    """Every arm under every seed; parts that were kept are not made again."""
    size = SMALL if settings.small else FULL
    size = size if settings.seeds is None else replace(size, seeds=settings.seeds)
    plan = Plan(steps=size.steps, rate=1e-3, warmup=0.1)
    facts = {name: value for name, value in size.to_json().items() if name in _DECIDING}
    writer = RowWriter(coordinates=COORDINATES)
    todo = [(arm, seed) for seed in range(size.seeds) for arm in size.arms()]
    for arm, seed in tqdm(todo, desc="training-fights-collapse", unit="network", disable=not settings.progress):
        made_from = {"arm": asdict(arm), "seed": seed, "size": facts, "plan": asdict(plan)}
        written(writer, settings.keep, f"{arm.name}-seed{seed}", made_from, partial(train, arm, seed, size, plan))
    return Run(
        kind="reproduce:training-fights-collapse",
        provenance=Provenance(
            model="BERT and GPT-2 for the sort task",
            origin="init",
            seed=0,
            weights_dtype="float32",
            arithmetic_dtype="float32, exact at some steps",
            attention="sdpa",
            sequences=size.held,
        ),
        floor=exact_floors("float32"),
        verdict="",
        table=writer.table(),
        extra={
            "size": size.to_json(),
            "plan": asdict(plan),
            "collapsed": collapsed_accuracy(size),
            "small": settings.small,
        },
    )


_DECIDING = ("width", "heads", "looks", "probed", "seen", "learnt", "held")


def collapsed_accuracy(size: Size) -> float:
    """What a network can get right whose tokens are all equal after the last block, mean over seeds; for both tasks."""
    tasks = [sort_task(seed, train=size.learnt, held=size.held, fresh=True) for seed in range(size.seeds)]
    return float(np.mean([one_answer_per_sequence(task.held.labels) for task in tasks]))


def train(arm: Arm, seed: int, size: Size, plan: Plan, writer: RowWriter) -> None:
    """Train one network under its surgery, watch it, and judge it on sequences it has not seen."""
    size, plan = replace(size, steps=size.steps * arm.longer), replace(plan, steps=plan.steps * arm.longer)
    task = task_for(arm, size, seed)
    model = network_for(arm, size, task, seed)
    loaded = load(model)
    prepared = prepare_inputs(loaded, probe_of(task, size.seen))
    watcher = Watcher(
        arm,
        seed,
        size,
        loaded,
        view_of(model, prepared[0]),
        prepared,
        probe_of(task, size.probed),
        writer,
    )
    done = fit(model, task, plan, seed=seed, operation=arm.operation, on_step=watcher)
    at = {**arm.at(), "seed": seed, "step": size.steps}
    with operating(model, arm.operation):
        watcher.add("accuracy", "model.out", arm.depth - 1, share_right(model, task.held), at)
    for cut in arm.cuts:
        with operating(model, VARIANTS[cut]):
            watcher.look_exactly({**at, "cut": cut})
    watcher.add("final_loss", "model.out", arm.depth - 1, float(np.mean(done.losses[-LAST:])), at)
    watcher.add("seconds", "model.out", arm.depth - 1, done.seconds, at)
