"""Grafts as a user may write them, one at each place that no remedy of the library uses."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope.models.view import Label, ModelView
from rankscope.surgery.graft import Amount, Attended, BlockGains, Graft, Number, Place, Spot, amount_at


class LengthScale(Graft):
    """Scores times s log(n), with n the number of keys a query sees."""

    touches: ClassVar[frozenset[Place]] = frozenset({"scores"})

    def __init__(self, view: ModelView, scale: float) -> None:
        super().__init__()
        self.gains = BlockGains(view, {"scale": scale}, learnable=False)

    def score_gain(self, at: Spot, keys: Tensor) -> Number:
        return self.gains.at(at, "scale") * keys.clamp(min=1).double().log()


class ValueMixing(Graft):
    """Attention reads (1 - s) V + s V_1, with V_1 the values of the first block."""

    touches: ClassVar[frozenset[Place]] = frozenset({"values"})

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self._first: Tensor | None = None

    def reset(self) -> None:
        self._first = None

    def values(self, at: Spot, value: Tensor) -> Tensor:
        if at.layer == 0:
            self._first = value
            return value
        assert self._first is not None
        return (1.0 - self.share) * value + self.share * self._first


class NormGains(Graft):
    """Every norm of the stream times a factor."""

    touches: ClassVar[frozenset[Place]] = frozenset({"norms"})

    def __init__(self, factor: Amount) -> None:
        super().__init__()
        self.factor = factor

    def norm(self, at: Spot, x: Tensor, out: Tensor, *, is_last: bool) -> Tensor:
        return out * amount_at(self.factor, at)


class Contrast(Graft):
    """X - s softmax(X X^T) X after each block, rows of unit length in the softmax, over the keys a token sees."""

    touches: ClassVar[frozenset[Place]] = frozenset({"sums"})

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def sum(self, at: Spot, label: Label, total: Tensor, seen: Tensor | None) -> Tensor:
        if label not in ("mlp", "both"):
            return total
        unit = F.normalize(total, dim=-1)
        scores = unit @ unit.mT
        if seen is not None:
            visible = seen.any(dim=1) if seen.dim() == 4 else seen
            scores = scores.masked_fill(~visible, -torch.inf)
        return total - self.scale * (scores.softmax(dim=-1) @ total)


class OutputGate(Graft):
    """Attention returns sigmoid(X W) * P V, with X the input of the attention module."""

    touches: ClassVar[frozenset[Place]] = frozenset({"values"})

    def __init__(self, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator, dtype=torch.float64))

    def attended(self, at: Spot, heard: Attended) -> Tensor:
        assert heard.read is not None
        _, heads, tokens, width = heard.out.shape
        gate = torch.sigmoid(heard.read @ self.weight)
        return heard.out * gate.reshape(-1, tokens, heads, width).transpose(1, 2)
