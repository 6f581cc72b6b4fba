"""Training a small model on a task: one loop on accelerate, seeded, under surgery, with a callback at every step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, RandomSampler

from rankscope.errors import InputError, MissingExtraError
from rankscope.ext.papers.training.tasks import Examples, TrainingTask
from rankscope.models.inputs import Batch
from rankscope.stream.viewing import view_of
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation


@dataclass(frozen=True)
class TrainingPlan:
    """How a model is trained with AdamW.

    Attributes:
        steps: optimiser steps.
        batch: sequences per step.
        rate: highest learning rate.
        warmup: share of the steps over which the rate rises linearly from 0.
        falls: whether it then falls to 0 as a cosine, or stays.
        weight_decay: decoupled, as in AdamW.
        clip: largest gradient norm.
    """

    steps: int
    batch: int = 32
    rate: float = 1e-3
    warmup: float = 0.05
    falls: bool = True
    weight_decay: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "rate", "clip"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}={getattr(self, name)}: expected more than 0.")

    def factor(self, step: int) -> float:
        """Learning rate at a step, as a share of the highest."""
        rising = max(1.0, self.warmup * self.steps)
        if step < rising:
            return (step + 1) / rising
        if not self.falls:
            return 1.0
        along = (step - rising) / max(1.0, self.steps - rising)
        return 0.5 * (1.0 + float(torch.cos(torch.tensor(torch.pi * min(1.0, along)))))


@dataclass(frozen=True, eq=False)
class FitMoment:
    """What a callback sees at a step: gradients are computed, weights are not yet updated.

    Attributes:
        step: from 0.
        steps: in all.
        loss: of this step's batch.
        model: being trained.
    """

    step: int
    steps: int
    loss: float
    model: nn.Module


@dataclass(frozen=True)
class Fit:
    """How a training went.

    Attributes:
        losses: of every step.
        seconds: duration.
    """

    losses: tuple[float, ...]
    seconds: float

    @property
    def final_loss(self) -> float:
        """Mean over the last twentieth of the steps, at least one."""
        tail = self.losses[-max(1, len(self.losses) // 20) :]
        return math.fsum(tail) / len(tail)


OnStep = Callable[[FitMoment], None]
Schedule = Callable[[int], Operation]


def fit(
    model: nn.Module,
    task: TrainingTask,
    plan: TrainingPlan,
    *,
    seed: int = 0,
    operation: Operation | Schedule | None = None,
    on_step: OnStep | None = None,
) -> Fit:
    """Train ``model`` on ``task`` in place.

    Args:
        model: gives an output with a ``loss`` when called with the task's inputs and ``labels``.
        task: what to learn.
        plan: how.
        seed: of the order of the examples.
        operation: surgery the model is trained under; a function returns one for each step.
        on_step: called at every step after the backward pass.

    Raises:
        MissingExtraError: without accelerate.

    Example:
        >>> from rankscope.ext.papers.training.networks import WITHOUT_MLP, encoder_for
        >>> from rankscope.ext.papers.training.tasks import sort_task
        >>> task = sort_task(train=20, held=10)
        >>> model = encoder_for(task, layers=1, width=8)
        >>> len(fit(model, task, TrainingPlan(steps=3), operation=WITHOUT_MLP).losses)
        3
    """
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise MissingExtraError("training", "accelerate", "accelerate") from error
    accelerator = Accelerator(cpu=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rule = torch.optim.AdamW(trained, lr=plan.rate, weight_decay=plan.weight_decay, fused=True)
    falling = torch.optim.lr_scheduler.LambdaLR(rule, plan.factor)
    model, rule, falling = accelerator.prepare(model.train(), rule, falling)
    started = time.perf_counter()
    losses: list[float] = []
    with ExitStack() as around:
        view = None if operation is None else view_of(model, as_batch(task.train.take(slice(2))))
        if isinstance(operation, Operation):
            around.enter_context(operating(model, operation, view=view))
        for step, examples in enumerate(batches(task.train, plan, seed)):
            with ExitStack() as now:
                if callable(operation):
                    now.enter_context(operating(model, operation(step), view=view))
                loss: Tensor = model(**examples.inputs, labels=examples.labels).loss
                accelerator.backward(loss)
                losses.append(float(loss.detach()))
                if on_step is not None:
                    on_step(FitMoment(step, plan.steps, losses[-1], model))
            accelerator.clip_grad_norm_(trained, plan.clip)
            rule.step()
            falling.step()
            rule.zero_grad()
    model.eval()
    return Fit(tuple(losses), time.perf_counter() - started)


def batches(examples: Examples, plan: TrainingPlan, seed: int) -> Iterator[Examples]:
    """As many batches as the plan has steps; each epoch goes through all examples in random order."""
    generator = torch.Generator().manual_seed(seed)
    order = BatchSampler(RandomSampler(range(len(examples)), generator=generator), plan.batch, drop_last=False)
    done = 0
    while True:
        for rows in order:
            if done == plan.steps:
                return
            yield examples.take(torch.tensor(rows))
            done += 1


def as_batch(examples: Examples) -> Batch:
    """The examples as the batch of a verb."""
    mask = examples.inputs.get("attention_mask")
    keep = None if mask is None else mask.bool()
    return Batch(dict(examples.inputs), keep, 0, len(examples))


def share_right(model: nn.Module, examples: Examples, *, batch: int = 100) -> float:
    """Accuracy of the model; labels below zero do not count."""
    from rankscope.ext.paths.effectiveness import accuracy

    def scored() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(examples), batch):
            part = examples.take(slice(start, start + batch))
            output: Any = model(**part.inputs)
            yield output.logits, part.labels

    with torch.no_grad():
        return accuracy(scored())
