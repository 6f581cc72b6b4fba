"""The smallest programs that rows are shown on and tested with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Program:
    """A model, a batch, the loss, and the optimizer that is made from the model."""

    model: nn.Module
    inputs: Any
    labels: Any = None
    loss: Callable[..., Tensor] = F.cross_entropy
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(model.parameters(), 1e-3)


class Reader(nn.Module):
    """Logits of the next id at each token, which sees itself and the mean of the tokens before it."""

    def __init__(self, classes: int = 20) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, classes)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return self.head(x + self.mix(before).tanh())


class Classifier(Reader):
    """Logits of three classes of a sequence."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids).mean(1)


def ids(sequences: int = 12, tokens: int = 10) -> Tensor:
    """Random ids."""
    return torch.randint(1, 20, (sequences, tokens))


def classes() -> Tensor:
    """A class for each of twelve sequences."""
    return torch.arange(12) % 3


def per_token(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the id at each token."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def classified(loss: Callable[..., Tensor] = F.cross_entropy) -> Program:
    """Sequences with a class each, under some loss."""
    return Program(Classifier(), ids(), classes(), loss)


def predicted(first: int, last: int | None) -> Program:
    """Text whose labels begin at one token and end at another, read from its beginning."""
    text = ids(12, 12)
    labels = text[:, first:last]
    return Program(Reader(), text[:, : labels.shape[1]], labels, per_token)
