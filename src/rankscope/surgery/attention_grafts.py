"""Grafts inside attention: on its queries and keys, its matrix and its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor

from rankscope.errors import UnsupportedOperationError
from rankscope.models.view import ModelView
from rankscope.surgery.graft import (
    BlockGains,
    Graft,
    Mixture,
    Number,
    Place,
    ScoreMap,
    Spot,
)
from rankscope.surgery.surgeon import normed

Rule = Callable[[Mapping[str, Number]], Mixture]


class AttentionMixing(Graft):
    """The attention matrix as a mixture of identity, itself and the uniform matrix.

    Args:
        view: the model.
        start: initial values by name, the same in every block.
        rule: maps these values to a mixture.
        learnable: make them parameters, one per block and name.
    """

    name: ClassVar[str] = "attention mixing"
    touches: ClassVar[frozenset[Place]] = frozenset({"probs"})

    def __init__(self, view: ModelView, start: Mapping[str, float], rule: Rule, *, learnable: bool = False) -> None:
        super().__init__()
        self.gains = BlockGains(view, start, learnable=learnable)
        self._names, self._rule = tuple(start), rule

    def mixture(self, at: Spot) -> Mixture:
        """The mixture of one block."""
        return self._rule({name: self.gains.at(at, name) for name in self._names})


class QueryKeyNorm(Graft):
    r"""Scores :math:`g\sqrt{d}\cos(q_i, k_j)`: queries and keys of each head with root mean square 1, times g.

    Whatever scale the model had on its scores is replaced. Rotary positions leave lengths alone, so the norm may come
    after them.

    Args:
        view: the model.
        gain: g.
        learnable: make it a parameter, one per block.
    """

    name: ClassVar[str] = "query-key norm"
    touches: ClassVar[frozenset[Place]] = frozenset({"queries"})

    def __init__(self, view: ModelView, gain: float, *, learnable: bool = False) -> None:
        super().__init__()
        self.gains = BlockGains(view, {"gain": gain}, learnable=learnable)

    def scores(self, at: Spot, own: ScoreMap) -> ScoreMap:
        """The products of normed queries and keys; a zero query stays zero."""
        query, key = (normed(x, x, "scale") for x in (own.query, own.key))
        return ScoreMap(self.gains.at(at, "gain") * query, key, query.shape[-1] ** 0.5)


class ValueAnchor(Graft):
    r"""Attention returns :math:`PV + \lambda(V_1 - V)`, with :math:`V_1` the values of the first block of its stack.

    Args:
        view: the model.
        pull: lambda.
        learnable: make it a parameter, one per block.
    """

    name: ClassVar[str] = "value anchor"
    touches: ClassVar[frozenset[Place]] = frozenset({"values"})

    def __init__(self, view: ModelView, pull: float, *, learnable: bool = False) -> None:
        super().__init__()
        self.gains = BlockGains(view, {"pull": pull}, learnable=learnable)
        self._first: dict[str | None, Tensor] = {}

    def reset(self) -> None:
        """Forget the values of the first block."""
        self._first.clear()

    def attended(self, at: Spot, out: Tensor, value: Tensor) -> Tensor:
        """The output, pulled towards the first block's values."""
        first = self._first_values(at, value)
        if value.shape[-2] != out.shape[-2]:
            raise UnsupportedOperationError(
                f"Block {at.layer} has {out.shape[-2]} queries and {value.shape[-2]} keys: values cannot be added "
                "token by token. Run whole sequences, without cached keys."
            )
        return out + self.gains.at(at, "pull") * (first - value)

    def _first_values(self, at: Spot, value: Tensor) -> Tensor:
        """The first block's values, kept when that block runs."""
        if at.layer == 0:
            self._first[at.stack] = value
        first = self._first.get(at.stack)
        if first is None:
            raise UnsupportedOperationError(
                f"Block {at.layer} ran without the first one having run in the same pass (gradient checkpointing runs "
                "blocks again by themselves): the first block's values are not there. Switch checkpointing off."
            )
        if first.shape != value.shape:
            raise UnsupportedOperationError(
                f"The values of block {at.layer} have the shape {tuple(value.shape)} and those of the first "
                f"{tuple(first.shape)}: they cannot be mixed."
            )
        return first
