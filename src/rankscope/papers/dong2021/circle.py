"""Two points sent round a circle by one trained block, free-running: do they meet?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from rankscope.exact_arithmetic.running import exact_stream
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.models.inputs import Batch
from rankscope.papers._recipe import Settings
from rankscope.papers.dong2021.circle_network import VARIANTS, RecurrentBlock, recurrent_block
from rankscope.papers.training.fitting import Plan, fit
from rankscope.papers.training.keeping import Row, kept, write_rows
from rankscope.papers.training.tasks import circle_task
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.viewing import view_of
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.origin import floor_of

DISTANCE, CENTRE, EXACT, LOSS, RADIAL = "distance", "centre", "log10_distance_exact", "final_loss", "radial_factor"
PLACES = ("x_first", "y_first", "x_second", "y_second")
COORDINATES = ("variant", "width", "seed")
RADIUS, FAR = 0.3, 1e6
"""Of the circle; and a distance from its centre at which a trajectory has left for good."""


@dataclass(frozen=True)
class Size:
    """How much is run."""

    widths: tuple[int, ...]
    seeds: int
    steps: int
    angles: int
    plan: Plan


FULL = Size((32, 128), 3, 300, 1000, Plan(steps=400, batch=100, rate=3e-3))
SMALL = Size((8,), 1, 12, 1000, Plan(steps=40, batch=100, rate=3e-3))


def measure_circle(settings: Settings) -> Run:
    """Every variant at every width, several seeds."""
    size = SMALL if settings.small else FULL
    seeds = settings.seeds or size.seeds
    writer = RowWriter(coordinates=COORDINATES)
    work = [(name, width, seed) for width in size.widths for name in VARIANTS for seed in range(seeds)]
    for name, width, seed in tqdm(work, desc="dong2021-circle", unit="network", disable=not settings.progress):
        facts = {"variant": name, "width": width, "seed": seed, "size": asdict(size), "version": 1}
        piece = f"circle-{name.replace(' ', '')}-{width}-{seed}"
        write_rows(writer, kept(settings.keep, piece, facts, partial(one, size, name, width, seed)), "points")
    return Run(
        kind="reproduce:dong2021-circle",
        provenance=Provenance(
            model="RecurrentBlock (one BertLayer) trained on the circle",
            origin="trained",
            seed=0,
            weights_dtype="float64",
            arithmetic_dtype="float64",
            sequences=1,
            lengths=(2,),
            operations=tuple({"variant": name, **operation.describe()} for name, operation in VARIANTS.items()),
        ),
        floor=floor_of({torch.float64}),
        verdict="",
        table=writer.table(),
        extra={"small": settings.small, "seeds": seeds, **asdict(size)},
    )


def one(size: Size, variant: str, width: int, seed: int) -> list[Row]:
    """Train one block and let it run."""
    task, operation = circle_task(seed, angles=size.angles), VARIANTS[variant]
    model = recurrent_block(width, seed=seed)
    how = fit(model, task, size.plan, seed=seed, operation=operation)
    start = task.train.inputs["points"][:1]
    rows = [_row(LOSS, how.final_loss)]
    rows.append(_row(RADIAL, radial_factor(model, operation, task.train.inputs["points"][:: size.angles // 20])))
    path = free_run(model, operation, start, size.steps)
    for step, pair in enumerate(path):
        rows.append(_row(DISTANCE, float((pair[0] - pair[1]).norm()), step))
        rows.append(_row(CENTRE, float(pair.mean(dim=0).norm()), step))
        if seed == 0:
            rows += [_row(name, value, step) for name, value in zip(PLACES, pair.flatten().tolist(), strict=True)]
    for step, value in enumerate(exact_distances(model, operation, start, len(path) - 1)):
        rows.append(_row(EXACT, value, step))
    return [{**row, "variant": variant, "width": width, "seed": seed} for row in rows]


def _row(metric: str, value: float, step: int = 0) -> Row:
    return {"metric": metric, "layer": step, "value": value}


@contextmanager
def _operated(model: nn.Module, operation: Operation, points: Tensor, steps: int = 1) -> Iterator[tuple[Any, Batch]]:
    batch = Batch({"points": points, "steps": steps}, None, 0, points.shape[0])
    view = view_of(model, batch, blocks="layer.0")
    with operating(model, operation, view=view):
        yield view, batch


def free_run(model: RecurrentBlock, operation: Operation, start: Tensor, steps: int) -> list[Tensor]:
    """The two points (2, 2) after 0, 1, ... steps, each from the one before; ends early beyond :data:`FAR`."""
    found = [start[0]]
    with torch.no_grad(), _operated(model, operation, start):
        for _ in range(steps):
            points = model(found[-1][None]).points[0]
            if not float(points.abs().max()) < FAR:
                break
            found.append(points)
    return found


def radial_factor(model: RecurrentBlock, operation: Operation, points: Tensor) -> float:
    r"""Geometric mean over the circle of how one step stretches a small change of radius. Exact (a derivative).

    Both points move outwards at once; the factor is the derivative of the mean of their new radii. Above 1 the circle
    pushes away whatever has left it.
    """
    points = points.clone().requires_grad_()
    with _operated(model, operation, points[:1].detach()), torch.enable_grad():
        radii = model(points).points.norm(dim=-1).mean(dim=-1)
        (gradient,) = torch.autograd.grad(radii.sum(), points)
    outward = (points / points.norm(dim=-1, keepdim=True)).detach()
    along = (gradient * outward).sum(dim=(-2, -1))
    return float(along.abs().log().mean().exp())


def exact_distances(model: RecurrentBlock, operation: Operation, start: Tensor, steps: int) -> list[float]:
    """Decimal logarithm of the distance between the points after 0, 1, ... steps, in exact arithmetic."""
    logs = [math.log10(float((start[0, 0] - start[0, 1]).norm()))]

    def note(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        if isinstance(out, Deviation):
            logs.append((out.log_residual() + 0.5 * math.log(2.0)) / math.log(10.0))

    # The pass ends with the last block, before what it gave is written as points: one step more shows them all.
    with _operated(model, operation, start, steps + 1) as (view, batch):
        handle = model.writing.register_forward_hook(note)
        try:
            exact_stream(view, batch, lambda *_: None)
        finally:
            handle.remove()
    return logs
