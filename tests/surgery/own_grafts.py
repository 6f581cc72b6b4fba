"""Grafts as a user may write them, one at each place that no remedy of the library uses."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from rankscope.surgery.graft import Amount, Graft, Place, Spot, amount_at


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
