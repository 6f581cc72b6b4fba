"""Small networks that learn to sort, for the scripts that train: the task, a BERT for it, and one training loop.

Sizes follow Dong, Cordonnier and Loukas (2021), sections 4.2 and 4.3. A network without MLPs is a BERT whose MLPs have
width 1 and are dropped by surgery, in training too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, RandomSampler
from transformers import BertConfig, BertForTokenClassification

import rankscope as rs

NO_MLP = {"mlp": "drop"}
IGNORED = -100
"""The label of padding."""


@dataclass(frozen=True)
class Examples:
    """Keyword arguments of a model's forward, sequences first, and a label per token; below zero it does not count."""

    inputs: dict[str, Tensor]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Any) -> Examples:
        """Some of the sequences, cut to the longest of them if there is an attention mask."""
        mask = self.inputs.get("attention_mask")
        longest = None if mask is None else int(mask[rows].sum(dim=1).max())
        cut = {name: value[rows][:, :longest].contiguous() for name, value in self.inputs.items()}
        return Examples(cut, self.labels[rows][:, :longest].contiguous())


@dataclass(frozen=True)
class Task:
    """What is learned.

    ``vocabulary`` is 0 if tokens are points of the plane; ``positions`` says whether the model knows their places.
    """

    train: Examples
    held: Examples
    classes: int
    vocabulary: int
    positions: bool


def sort_task(seed: int, *, train: int, held: int, length: int = 8, symbols: int = 10, fresh: bool = False) -> Task:
    """At each position, answer the symbol at that position of the sorted sequence.

    With ``fresh``, held-out sequences are drawn until none of them is a training sequence.
    """
    generator = np.random.default_rng([seed, 1])
    ids = generator.integers(0, symbols, size=(train + held, length))
    if fresh:
        seen = {row.tobytes() for row in ids[:train]}
        for row in range(train, train + held):
            while ids[row].tobytes() in seen:
                ids[row] = generator.integers(0, symbols, size=length)
    whole = Examples({"input_ids": torch.from_numpy(ids)}, torch.from_numpy(np.sort(ids, axis=1)))
    return Task(whole.take(slice(train)), whole.take(slice(train, None)), symbols, symbols, positions=True)


class BertForPoints(BertForTokenClassification):
    """BERT that embeds points of the plane with a learned linear map."""

    main_input_name = "points"

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.reading = nn.Linear(2, config.hidden_size)

    def forward(self, points: Tensor, labels: Tensor | None = None) -> Any:
        """Class scores per point, and the loss if labels are given."""
        return super().forward(inputs_embeds=self.reading(points), labels=labels)


def encoder(
    task: Task, *, layers: int, heads: int, width: int, seed: int, mlp_width: int = 1, std: float = 0.02
) -> BertForTokenClassification:
    """A BERT for ``task``, norms after each sum; without positions, their embedding is frozen at zero."""
    config = BertConfig(
        vocab_size=max(task.vocabulary, 2),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=mlp_width,
        max_position_embeddings=task.train.labels.shape[1],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        type_vocab_size=1,
        pad_token_id=None,
        num_labels=task.classes,
        initializer_range=std,
    )
    torch.manual_seed(seed)
    model = (BertForTokenClassification if task.vocabulary else BertForPoints)(config)
    if not task.positions:
        model.bert.embeddings.position_embeddings.weight.requires_grad_(False).zero_()
    return model.train()


@dataclass(frozen=True)
class Plan:
    """AdamW with a linear warmup over a share of the steps and a cosine decay to 0; gradients are clipped at norm 1."""

    steps: int
    batch: int = 32
    rate: float = 1e-3
    warmup: float = 0.05

    def factor(self, step: int) -> float:
        """Learning rate at a step, as a share of the highest."""
        rising = max(1.0, self.warmup * self.steps)
        if step < rising:
            return (step + 1) / rising
        along = min(1.0, (step - rising) / max(1.0, self.steps - rising))
        return 0.5 * (1.0 + math.cos(math.pi * along))


def batches(examples: Examples, plan: Plan, seed: int) -> Iterator[Examples]:
    """As many batches as the plan has steps; each epoch goes through all examples in random order."""
    generator = torch.Generator().manual_seed(seed)
    order = BatchSampler(RandomSampler(range(len(examples)), generator=generator), plan.batch, drop_last=False)
    done = 0
    while done < plan.steps:
        for rows in order:
            if done < plan.steps:
                yield examples.take(torch.tensor(rows))
            done += 1


def fit(
    model: nn.Module,
    task: Task,
    plan: Plan,
    *,
    seed: int,
    surgery: dict[str, Any] | Callable[[int], dict[str, Any]] | None = None,
    blocks: str | None = None,
    before: Callable[[int], None] = lambda step: None,
    after: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train ``model`` under ``surgery`` and return the loss of every step.

    ``surgery`` may be a function of the step, and ``blocks`` names the blocks if they are not found by themselves.
    ``before`` is called before each step, ``after`` when its gradients are known and the weights not yet changed.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rule = torch.optim.AdamW(trained, lr=plan.rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(rule, plan.factor)
    losses = []
    # The structure is found once, on the whole network, before anything is removed.
    whole, few = rs.Model(model, blocks=blocks), rs.Inputs(task.train.take(slice(2)).inputs, padding="none")
    with rs.operate(whole, {}, inputs=few), nullcontext() if callable(surgery) else rs.operate(model, surgery):
        for step, examples in enumerate(batches(task.train, plan, seed)):
            with rs.operate(model, surgery(step)) if callable(surgery) else nullcontext():
                before(step)
                loss = model(**examples.inputs, labels=examples.labels).loss
                loss.backward()
            losses.append(float(loss.detach()))
            after(step, losses[-1])
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            rule.step()
            schedule.step()
            rule.zero_grad()
    model.eval()
    return losses


def final_loss(losses: list[float]) -> float:
    """Mean over the last twentieth of the steps, at least one."""
    tail = losses[-max(1, len(losses) // 20) :]
    return math.fsum(tail) / len(tail)


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Share of labels with the largest score; labels below zero do not count."""
    counts = labels >= 0
    return int(((scores.argmax(dim=-1) == labels) & counts).sum()) / int(counts.sum())


@torch.no_grad()
def share_right(model: nn.Module, examples: Examples) -> float:
    """Accuracy of the model as it runs now."""
    return accuracy(model(**examples.inputs).logits, examples.labels)
