"""One block trained to move two points around a circle, then applied to its own output: do the points meet?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from transformers import BertConfig, BertPreTrainedModel
from transformers.modeling_outputs import ModelOutput
from transformers.models.bert.modeling_bert import BertLayer

from rankscope.exact_arithmetic.running import exact_stream
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.ext.papers._spec import ExperimentSize, Settings
from rankscope.ext.papers.dong2021_circle.show import PLACES
from rankscope.ext.papers.measuring.parts import RowRecorder, WorkPart, finished_run, measured_parts
from rankscope.ext.papers.training.fitting import TrainingPlan, fit
from rankscope.ext.papers.training.tasks import circle_task
from rankscope.models.inputs import Batch
from rankscope.runs.provenance import Provenance
from rankscope.runs.run import Run
from rankscope.stream.viewing import view_of
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.origin import floor_of

COORDINATES = ("variant", "width", "seed")
FAR = 1e6
"""Distance from the centre beyond which a trajectory does not return."""

VARIANTS: Mapping[str, Operation] = MappingProxyType(
    {
        "attention": Operation(attention_skip=0.0, mlp_skip=0.0, mlp="drop", norm="identity"),
        "attention + skip": Operation(mlp="drop", norm="identity"),
        "attention + MLP": Operation(attention_skip=0.0, mlp_skip=0.0, norm="identity"),
        "attention + skip + MLP": Operation(norm="identity"),
    }
)
"""What remains of the block. None has norms; "without skip" means without both skips."""


@dataclass(frozen=True, kw_only=True)
class CircleSize(ExperimentSize):
    """How much is run; ``steps`` counts applications of a trained block."""

    widths: tuple[int, ...]
    steps: int
    angles: int = 1000
    plan: TrainingPlan


FULL = CircleSize(widths=(32, 128), seeds=3, steps=300, plan=TrainingPlan(steps=400, batch=100, rate=3e-3))
SMALL = CircleSize(widths=(8,), seeds=1, steps=12, plan=TrainingPlan(steps=40, batch=100, rate=3e-3))


@dataclass
class Turned(ModelOutput):
    """The points after the last step, and the loss if a target was given."""

    points: Tensor | None = None
    loss: Tensor | None = None


class RecurrentBlock(BertPreTrainedModel):
    """Points to width, one BERT block, width to points; repeated at every further step.

    The block is one module that is called once per step, so that verbs see each step as a separate block.
    """

    main_input_name = "points"

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.reading = nn.Linear(2, config.hidden_size)
        self.layer = nn.ModuleList([BertLayer(config)])
        self.writing = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, points: Tensor, labels: Tensor | None = None, steps: int = 1) -> Turned:
        """``steps`` steps from ``points`` (batch, 2, 2)."""
        for _ in range(steps):
            points = self.writing(self.layer[0](self.reading(points)))
        return Turned(points=points, loss=None if labels is None else mse_loss(points, labels))


def recurrent_block(width: int, *, heads: int = 2, seed: int = 0) -> RecurrentBlock:
    """A block of this width in float64, its MLP four times as wide, initialised from ``seed``."""
    config: Any = BertConfig(
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=(3 * width) ** -0.5,
        vocab_size=2,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: RecurrentBlock = RecurrentBlock(config).double().train()
    return model


def measure(settings: Settings) -> Run:
    """Every variant at every width, several seeds."""
    size = settings.pick(FULL, SMALL)
    facts = {"angles": size.angles, "steps": size.steps, "plan": size.to_json()["plan"], "version": 2}
    parts = [
        WorkPart(
            f"circle-{variant.replace(' ', '')}-{width}-{seed}",
            {"variant": variant, "width": width, "seed": seed, **facts},
            partial(measure_block, size, variant, width, seed),
        )
        for width in size.widths
        for variant in VARIANTS
        for seed in range(size.seeds)
    ]
    provenance = Provenance(
        model="RecurrentBlock (one BertLayer) trained on the circle",
        origin="trained",
        seed=0,
        weights_dtype="float64",
        arithmetic_dtype="float64",
        sequences=1,
        lengths=(2,),
        operations=tuple({"variant": name, **operation.describe()} for name, operation in VARIANTS.items()),
    )
    writer = measured_parts(settings, COORDINATES, parts)
    return finished_run(settings, writer, provenance, floor_of({torch.float64}), small=settings.small, **size.to_json())


def measure_block(size: CircleSize, variant: str, width: int, seed: int, rows: RowRecorder) -> None:
    """Train one block and apply it to its own output."""
    task, operation = circle_task(seed, angles=size.angles), VARIANTS[variant]
    model = recurrent_block(width, seed=seed)
    points = task.train.inputs["points"]
    done = fit(model, task, size.plan, seed=seed, operation=operation)
    add = partial(rows.under(variant=variant, width=width, seed=seed).add, site="points")
    add("final_loss", done.final_loss)
    add("radial_factor", radial_factor(model, operation, points[:: size.angles // 20]))
    path = free_run(model, operation, points[:1], size.steps)
    for step, pair in enumerate(path):
        add("distance", float((pair[0] - pair[1]).norm()), layer=step)
        add("centre", float(pair.mean(dim=0).norm()), layer=step)
        if seed == 0:
            for name, value in zip(PLACES, pair.flatten().tolist(), strict=True):
                add(name, value, layer=step)
    for step, value in enumerate(exact_distances(model, operation, points[:1], len(path) - 1)):
        add("log10_distance_exact", value, layer=step)


@contextmanager
def _operated(model: nn.Module, operation: Operation, points: Tensor, steps: int = 1) -> Iterator[tuple[Any, Batch]]:
    batch = Batch({"points": points, "steps": steps}, None, 0, points.shape[0])
    view = view_of(model, batch, blocks="layer.0")
    with operating(model, operation, view=view):
        yield view, batch


def free_run(model: RecurrentBlock, operation: Operation, start: Tensor, steps: int) -> list[Tensor]:
    """The two points (2, 2) after 0, 1, ... steps, each from the previous one; ends early beyond :data:`FAR`."""
    states = [start[0]]
    with torch.no_grad(), _operated(model, operation, start):
        for _ in range(steps):
            points = model(states[-1][None]).points[0]
            if not float(points.abs().max()) < FAR:
                break
            states.append(points)
    return states


def radial_factor(model: RecurrentBlock, operation: Operation, points: Tensor) -> float:
    r"""Geometric mean over the circle of the factor by which one step changes a small change of radius. Exact.

    Both points move outwards at once; the factor is the derivative of the mean of their new radii. Above 1, points
    that have left the circle move further away.
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

    # The pass ends with the last block, before its output is written as points: one further step shows them all.
    with _operated(model, operation, start, steps + 1) as (view, batch):
        handle = model.writing.register_forward_hook(note)
        try:
            exact_stream(view, batch, lambda *_: None)
        finally:
            handle.remove()
    return logs
