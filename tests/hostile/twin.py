"""What a twin is made of: plain torch on a network's weights, without a call of any of its modules.

A network of this suite is written twice. ``forward`` is what rankscope sees, in the hostile form. ``twin`` is what a
person would write who wants the same network with its skips scaled, its MLPs or norms left out or its attention made
uniform; it also gives back the hidden states after each block. The two share weights and nothing else, so that neither
hooks nor function modes can reach the twin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Cut:
    """What is done to every block, or to those in ``layers``."""

    skip: float = 1.0
    mlp: bool = True
    norm: bool = True
    uniform: bool = False
    layers: frozenset[int] | None = None

    def at(self, layer: int) -> Cut:
        return self if self.layers is None or layer in self.layers else replace(WHOLE)


WHOLE = Cut()


class Twin(NamedTuple):
    """Output and hidden states (batch tokens dim), one for each block; ``counts`` marks the tokens that are content.

    ``told`` does so where only the user's declaration can say it.
    """

    output: Tensor
    states: list[Tensor]
    counts: Tensor | None = None
    told: Tensor | None = None

    def first(self) -> Twin:
        """The first sequence alone."""
        return self._replace(states=[x[:1] for x in self.states])

    def relative_residuals(self) -> list[list[float]]:
        """By layer and sequence: distance from the mean token over the norm."""
        return [
            [_relative_residual(x, self._kept(x, number)) for number, x in enumerate(state)] for state in self.states
        ]

    def _kept(self, x: Tensor, number: int) -> Tensor:
        if self.counts is None or self.counts.shape[1] != x.shape[0]:
            return torch.ones(x.shape[0], dtype=torch.bool)
        return self.counts[number]


def _relative_residual(x: Tensor, kept: Tensor) -> float:
    rows = x[kept].double()
    return float((rows - rows.mean(0)).norm() / rows.norm())


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(layer, nn.Linear)
    out = x @ layer.weight.T
    return out if layer.bias is None else out + layer.bias


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    out = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def rms_norm(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    out = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return out if weight is None else out * weight


def norm(module: nn.Module | None, x: Tensor, cut: Cut = WHOLE) -> Tensor:
    """A norm of the suite, or nothing under a cut of norms."""
    if module is None or not cut.norm:
        return x
    if isinstance(module, nn.LayerNorm):
        return layer_norm(x, module.weight, module.bias, module.eps)
    if isinstance(module, nn.RMSNorm):
        return rms_norm(x, module.weight, module.eps)
    return module.by_hand(x)


def softmax(scores: Tensor, hidden: Tensor | None) -> Tensor:
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    return weights / weights.sum(-1, keepdim=True)


def uniform(scores: Tensor, hidden: Tensor | None) -> Tensor:
    seen = torch.ones_like(scores) if hidden is None else (~hidden).to(scores.dtype).expand(scores.shape)
    return seen / seen.sum(-1, keepdim=True)


def probabilities(scores: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
    return uniform(scores, hidden) if cut.uniform else softmax(scores, hidden)


def split(x: Tensor, heads: int) -> Tensor:
    return torch.stack(x.chunk(heads, dim=-1), dim=1)


def merge(x: Tensor) -> Tensor:
    return torch.cat(list(x.unbind(1)), dim=-1)


def later(tokens: int) -> Tensor:
    """True where a key comes after the query."""
    return torch.arange(tokens)[None, :] > torch.arange(tokens)[:, None]
