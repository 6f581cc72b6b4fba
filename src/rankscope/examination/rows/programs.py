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
        """Logits of the next id at each token."""
        x = self.embed(ids)
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return self.head(x + self.mix(before).tanh())


class Classifier(Reader):
    """Logits of three classes of a sequence."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, ids: Tensor) -> Any:
        """Logits of a class."""
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


class Attention(nn.Module):
    """Softmax attention of four heads, written out, with at most one fault.

    Args:
        fault: ``"unmasked"``, ``"queries"`` (softmax over them), ``"after"`` (mask after the softmax), ``"split"`` or
            ``"merge"`` (a view for a transpose), ``"heads"`` (attention between them), ``"sharp"`` (scores are not
            scaled), ``"flat"`` (they are scaled four times); empty for none.
        causal: whether tokens see no later one.
    """

    def __init__(self, fault: str = "", *, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.fault, self.causal = nn.Linear(32, 96), nn.Linear(32, 32), fault, causal

    def forward(self, x: Tensor) -> Tensor:
        """What attention adds to each token."""
        size, tokens, _ = x.shape
        parts = self.qkv(x).chunk(3, -1)
        if self.fault == "split":
            q, k, v = (one.reshape(size, 4, tokens, 8) for one in parts)
        elif self.fault == "heads":
            q, k, v = (one.reshape(size, tokens, 4, 8) for one in parts)
        else:
            q, k, v = (one.reshape(size, tokens, 4, 8).transpose(1, 2) for one in parts)
        power = {"sharp": -0.75, "flat": 2.0}.get(self.fault, 0.5)
        scores = q @ k.transpose(-1, -2) / 8**power
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        masked = self.causal and self.fault not in ("unmasked", "after", "heads")
        scores = scores.masked_fill(hidden, -1e9) if masked else scores
        probs = scores.softmax(-2 if self.fault == "queries" else -1)
        if self.fault == "after":
            probs = probs.masked_fill(hidden, 0.0)
        mixed = probs @ v
        mixed = mixed if self.fault in ("merge", "heads") else mixed.transpose(1, 2)
        out: Tensor = self.out(mixed.reshape(size, tokens, 32))
        return out


class Layer(nn.Module):
    """A block of a transformer: attention and a feed-forward part, each with a norm and a skip connection of a gain."""

    def __init__(self, fault: str = "", gain: float = 1.0, *, causal: bool = True, post: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2, self.gain, self.post = nn.LayerNorm(32), nn.LayerNorm(32), gain, post
        self.attention = Attention(fault, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        """Both parts, one after the other."""
        if self.post:
            x = self.norm1(x + self.attention(x))
            normed: Tensor = self.norm2(x + self.mlp(x))
            return normed
        x = self.gain * x + self.attention(self.norm1(x))
        out: Tensor = self.gain * x + self.mlp(self.norm2(x))
        return out


class Decoder(nn.Module):
    """Logits of the next id, from two blocks."""

    def __init__(self, fault: str = "", *, depth: int = 2, causal: bool = True) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 32), nn.Parameter(torch.randn(12, 32))
        self.layers = nn.ModuleList(Layer(fault, causal=causal) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 20)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next id at each token."""
        x = self.embed(ids) + self.place[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


def decoder(fault: str = "") -> Program:
    """Text whose label is the next token, under a decoder."""
    text = ids(12, 11)
    return Program(Decoder(fault), text[:, :-1], text[:, 1:], per_token)


def stack(blocks: list[nn.Module], tokens: int = 16) -> Program:
    """Blocks one after another, on vectors."""
    inputs = torch.randn(6, tokens, 32)
    return Program(nn.Sequential(*blocks), inputs, inputs.roll(1, 1), F.mse_loss)
