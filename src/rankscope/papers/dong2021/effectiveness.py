"""Trained networks cut down to paths of one length: how much of the task each length still solves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType

import torch
from tqdm.auto import tqdm

from rankscope.papers._recipe import Settings
from rankscope.papers.dong2021.effectiveness_judging import ACCURACY, judge, path_row
from rankscope.papers.dong2021.guessing import guesses
from rankscope.papers.training.fitting import Plan, as_batch, fit, share_right
from rankscope.papers.training.keeping import Row, kept, write_rows
from rankscope.papers.training.networks import WITHOUT_MLP, encoder_for
from rankscope.papers.training.tasks import Examples, Task, hull_task, memory_task, sort_task
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.viewing import undisturbed, view_of
from rankscope.surgery.operating import operating
from rankscope.verbs.origin import floor_of

LOSS = "final_loss"
AS_PUBLISHED = "whole, trained as published"
COORDINATES = ("of", "paths", "seed")


@dataclass(frozen=True)
class Case:
    """One task with its network and how it is trained.

    Attributes:
        make: the task from a seed.
        layers: blocks.
        heads: of a block.
        width: of the stream.
        plan: of the training.
        seeds: networks trained, each on data of its own.
        judged: sequences on which paths are judged; None for all that are held.
        published: the paper's own way of training, run once beside ours; None where it would take too long.
    """

    make: Callable[[int], Task]
    layers: int
    heads: int
    width: int
    plan: Plan
    seeds: int
    judged: int | None = None
    published: Plan | None = None


_SORT = Plan(steps=65 * 34, batch=30, rate=1e-5, warmup=0.0, falls=False, clip=math.inf)
"""65 epochs of 1000 sequences in batches of 30."""

CASES: Mapping[str, Case] = MappingProxyType(
    {
        "sort": Case(sort_task, 6, 2, 48, Plan(steps=500, batch=100, rate=1e-3), 6, None, _SORT),
        "hull": Case(hull_task, 6, 3, 84, Plan(steps=300, batch=100, rate=1e-3), seeds=3),
        "memory": Case(memory_task, 6, 2, 250, Plan(steps=250, batch=16, rate=1e-3), seeds=3, judged=50),
    }
)
SMALL: Mapping[str, Case] = MappingProxyType(
    {
        "sort": Case(lambda s: sort_task(s, train=60, held=20), 3, 2, 16, Plan(steps=30, batch=20), seeds=2),
        "hull": Case(lambda s: hull_task(s, train=60, held=20), 3, 2, 16, Plan(steps=20, batch=20), seeds=2),
        "memory": Case(
            lambda s: memory_task(s, sentences=12, vocabulary=40, mean=8), 3, 2, 16, Plan(steps=20, batch=6), seeds=2
        ),
    }
)


def measure_sort(settings: Settings) -> Run:
    """Sorting."""
    return _measure("sort", settings)


def measure_hull(settings: Settings) -> Run:
    """Convex hull."""
    return _measure("hull", settings)


def measure_memory(settings: Settings) -> Run:
    """Memorisation."""
    return _measure("memory", settings)


def _measure(name: str, settings: Settings) -> Run:
    case = (SMALL if settings.small else CASES)[name]
    writer = RowWriter(coordinates=COORDINATES)
    seeds = settings.seeds or case.seeds
    for seed in tqdm(range(seeds), desc=f"dong2021-paths-{name}", unit="network", disable=not settings.progress):
        facts = {"task": name, "seed": seed, "small": settings.small, "version": 1, **_facts(case)}
        write_rows(writer, kept(settings.keep, f"paths-{name}-{seed}", facts, partial(one, case, seed)), "final")
    task = case.make(0)
    model = encoder_for(task, layers=case.layers, heads=case.heads, width=case.width)
    return Run(
        kind=f"reproduce:dong2021-paths-{name}",
        provenance=Provenance(
            model=f"BertForTokenClassification trained on {name}",
            origin="trained",
            seed=0,
            parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
            weights_dtype="float32",
            arithmetic_dtype="float32",
            sequences=len(task.held) if case.judged is None else case.judged,
            operations=(WITHOUT_MLP.describe(),),
        ),
        floor=floor_of({torch.float32}),
        verdict="",
        table=writer.table(),
        extra={"task": name, "small": settings.small, **_facts(case)},
    )


def _facts(case: Case) -> dict[str, object]:
    """What a text has to say of a case, in JSON types."""
    task = case.make(0)
    return {
        "layers": case.layers,
        "heads": case.heads,
        "width": case.width,
        "judged": case.judged,
        "train": len(task.train),
        "held": len(task.held),
        "plan": asdict(case.plan),
    }


def one(case: Case, seed: int) -> list[Row]:
    """Train one network and judge its paths."""
    task = case.make(seed)
    model = encoder_for(task, layers=case.layers, heads=case.heads, width=case.width, seed=seed)
    how = fit(model, task, case.plan, seed=seed, operation=WITHOUT_MLP)
    held = task.held if case.judged is None else task.held.take(slice(case.judged))
    rows = [path_row(LOSS, how.final_loss, "whole"), *_guess_rows(task.held, task)]
    with undisturbed(model):
        view = view_of(model, as_batch(held.take(slice(2))))
        rows += judge(model, view, held, task.held)
    if case.published is not None and seed == 0:
        rows.append(path_row(ACCURACY, _as_published(case, task), AS_PUBLISHED, paths="all"))
    return [{**row, "seed": seed} for row in rows]


def _as_published(case: Case, task: Task) -> float:
    assert case.published is not None
    model = encoder_for(task, layers=case.layers, heads=case.heads, width=case.width)
    fit(model, task, case.published, operation=WITHOUT_MLP)
    with operating(model, WITHOUT_MLP, inputs=as_batch(task.held.take(slice(2))).inputs):
        return share_right(model, task.held)


def _guess_rows(held: Examples, task: Task) -> list[Row]:
    return [path_row(ACCURACY, value, name) for name, value in guesses(held, positions=task.positions).items()]
