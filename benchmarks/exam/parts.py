"""What the exam is written with: a program, a case, and a small encoder and decoder that cases change in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HEADS, IDS, TOKENS, CLASSES, SEQUENCES = 32, 4, 40, 12, 4, 16


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-3)


@dataclass
class Program:
    """A model, a batch, its loss, and the optimizer that is made from the model."""

    model: nn.Module
    inputs: Any
    labels: Any
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam

    def loss_now(self) -> Tensor:
        """The loss of one pass on the batch."""
        output = self.model(**self.inputs) if isinstance(self.inputs, dict) else self.model(self.inputs)
        return self.loss(output, self.labels)


@dataclass(frozen=True)
class Case:
    """A cause of a taxonomy: where it is, and whether the four things given can show it."""

    make: Callable[[bool], Program]
    cause: str
    place: str
    decidable: bool

    @property
    def wrong(self) -> str:
        """What is wrong, in one sentence."""
        return self.make.__doc__ or ""


Make = Callable[[bool], Program]
CASES: list[Case] = []
NOT_WRITTEN = {
    "layer norm: regularization": "norms that decay are a common choice",
    "residual: dropout rate": "how much is dropped is a choice",
    "kernel: kernel memory": "chunks that see themselves alone may be meant",
    "kernel: hardware incompatibility": "needs another device than a CPU",
    "positions: relative position": "distances without a sign may be meant",
    "cache: update synchronization": "a value that is kept one step after its key may be meant",
    "cache: memory layout": "keys and values in another order are as possible",
    "pytorch 116333": "contiguity of one axis: raises or is slow, and the values are right",
    "transformers 17886": "a relative bias after pruning: the weights are possible without pruning",
    "pytorch 103082; transformers 19045, 37574; native-sparse-attention 20": "only while generating with a cache",
    "transformers 35896": "which layers have the window is in a configuration",
    "transformers 36096": "attention weights that are returned are read by no loss",
    "ai-edge-torch 6": "raises before a model exists",
}
"""Causes and reports that cannot be told from a model, a batch, the loss and the optimizer on a CPU."""


def case(cause: str, place: str, *, decidable: bool = True) -> Callable[[Make], Make]:
    """Enter a function that makes the faulty program, or its healthy twin; its docstring says what is wrong."""

    def enter(make: Make) -> Make:
        CASES.append(Case(make, cause, place, decidable))
        return make

    return enter


class Attention(nn.Module):
    """Attention of four heads; ``hidden`` is True where a key may not be seen."""

    def __init__(self, d: int = D) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5

    def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores.softmax(dim=-1)

    def merge(self, mixed: Tensor) -> Tensor:
        return mixed.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        return self.out(self.merge(self.weights(self.scores(q, k), hidden) @ v))


class FeedForward(nn.Module):
    def __init__(self, d: int = D) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, attention: Any = Attention, mlp: Any = FeedForward, norm: Any = nn.LayerNorm) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = norm(D), attention(), norm(D), mlp()

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), hidden)
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """The class of a sequence, from the mean of its tokens; padding has the id 0."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3, out: int = CLASSES) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(IDS, D), nn.Parameter(0.02 * torch.randn(TOKENS, D))
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, out)

    def mask(self, ids: Tensor) -> Tensor | None:
        return None

    def tokens(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.position[: ids.shape[1]]

    def states(self, ids: Tensor) -> Tensor:
        x, hidden = self.tokens(ids), self.mask(ids)
        for block in self.blocks:
            x = block(x, hidden)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.states(ids).mean(dim=1))


class Padded(Encoder):
    """An encoder that leaves padding out."""

    def mask(self, ids: Tensor) -> Tensor | None:
        return (ids == 0)[:, None, None, :]

    def forward(self, ids: Tensor) -> Tensor:
        real = (ids != 0).unsqueeze(-1)
        return self.head((self.states(ids) * real).sum(dim=1) / real.sum(dim=1))


class Decoder(Encoder):
    """The next id of every token."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
        super().__init__(block, depth, IDS)

    def mask(self, ids: Tensor) -> Tensor | None:
        return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(diagonal=1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.states(ids))


def ids() -> Tensor:
    return torch.randint(1, IDS, (SEQUENCES, TOKENS))


def classes() -> Tensor:
    return torch.randint(0, CLASSES, (SEQUENCES,))


def padded_ids() -> Tensor:
    lengths = torch.randint(4, TOKENS + 1, (SEQUENCES, 1))
    return ids().masked_fill(torch.arange(TOKENS) >= lengths, 0)


def classify(model: nn.Module, **given: Any) -> Program:
    """A program that learns classes of random sequences."""
    return Program(model, ids(), classes(), **given)


def classify_padded(model: nn.Module) -> Program:
    """A program that learns classes of sequences of different lengths."""
    return Program(model, padded_ids(), classes())


def per_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def predict(model: nn.Module, loss: Callable[[Any, Any], Tensor] = per_token) -> Program:
    """A program that learns the next id of sequences in which each id follows from the two before it."""
    text = torch.randint(1, IDS, (SEQUENCES, 2))
    for _ in range(TOKENS - 1):
        text = torch.cat([text, (text[:, -1:] + 3 * text[:, -2:-1]) % (IDS - 1) + 1], dim=1)
    return Program(model, text[:, :-1], text[:, 1:], loss)
