"""Grafts inside attention: mix its matrix, scale its scores with length, tie its values to those of the first layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rankscope.errors import UnsupportedOperationError
from rankscope.models.view import ModelView
from rankscope.surgery.graft import Attended, BlockGains, Graft, Mixture, Number, Place, Spot

Rule = Callable[[Mapping[str, Number]], Mixture]


class AttentionMixing(Graft):
    """The attention matrix as a mixture of identity, itself and the uniform matrix.

    Args:
        view: the model.
        start: initial values by name, the same in every block.
        rule: maps these values to a mixture.
        learnable: make them parameters, one per block and name.
    """

    touches: ClassVar[frozenset[Place]] = frozenset({"probs"})

    def __init__(self, view: ModelView, start: Mapping[str, float], rule: Rule, *, learnable: bool = False) -> None:
        super().__init__()
        self.gains = BlockGains(view, start, learnable=learnable)
        self._names, self._rule = tuple(start), rule

    def mixture(self, at: Spot) -> Mixture:
        """The mixture of one block."""
        return self._rule({name: self.gains.at(at, name) for name in self._names})

    def describe(self) -> dict[str, Any]:
        """The values, in plain JSON types."""
        return {"graft": "attention mixing", **self.gains.describe()}


class LengthScale(Graft):
    r"""Scores times :math:`s \log n`, with n the number of keys a query sees.

    Args:
        view: the model.
        scale: s.
        learnable: make s a parameter, one per block.
    """

    touches: ClassVar[frozenset[Place]] = frozenset({"scores"})

    def __init__(self, view: ModelView, scale: float, *, learnable: bool = False) -> None:
        super().__init__()
        self.gains = BlockGains(view, {"scale": scale}, learnable=learnable)

    def score_gain(self, at: Spot, keys: Tensor) -> Number:
        """The factor s log n; rows that see one key or none are left unchanged."""
        return self.gains.at(at, "scale") * keys.clamp(min=1).double().log()

    def describe(self) -> dict[str, Any]:
        """The scale."""
        return {"graft": "length scale", **self.gains.describe()}


class _FirstValues(Graft):
    """Keeps the values of the first block of each stack during a pass."""

    touches: ClassVar[frozenset[Place]] = frozenset({"values"})

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[str | None, Tensor] = {}

    def reset(self) -> None:
        """Forget the values."""
        self._first.clear()

    def first(self, at: Spot, value: Tensor) -> Tensor:
        """The first block's values, in a matching shape."""
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


class ValueMixing(_FirstValues):
    r"""Attention reads :math:`(1-\lambda)V + \lambda V_1`, with :math:`V_1` the values of the first block.

    Args:
        view: the model.
        share: lambda.
        learnable: make it a parameter, one per block.
    """

    def __init__(self, view: ModelView, share: float, *, learnable: bool = False) -> None:
        super().__init__()
        self.gains = BlockGains(view, {"share": share}, learnable=learnable)

    def values(self, at: Spot, value: Tensor) -> Tensor:
        """The mixture; the first block keeps its own values."""
        share = self.gains.at(at, "share")
        first = self.first(at, value)
        return value if at.layer == 0 else (1.0 - share) * value + share * first

    def describe(self) -> dict[str, Any]:
        """The share."""
        return {"graft": "value mixing", **self.gains.describe()}


class ValueAnchor(_FirstValues):
    r"""Attention returns :math:`PV + \lambda(V_1 - V)`, with :math:`V_1` the values of the first block.

    Args:
        view: the model.
        pull: lambda.
        learnable: make it a parameter, one per block.
    """

    def __init__(self, view: ModelView, pull: float, *, learnable: bool = False) -> None:
        super().__init__()
        self.gains = BlockGains(view, {"pull": pull}, learnable=learnable)

    def attended(self, at: Spot, heard: Attended) -> Tensor:
        """The output, pulled towards the first block's values."""
        first = self.first(at, heard.value)
        if heard.value.shape[-2] != heard.out.shape[-2]:
            raise UnsupportedOperationError(
                f"Block {at.layer} has {heard.out.shape[-2]} queries and {heard.value.shape[-2]} keys: values cannot "
                "be added token by token. Run whole sequences, without cached keys."
            )
        return heard.out + self.gains.at(at, "pull") * (first - heard.value)

    def describe(self) -> dict[str, Any]:
        """The pull."""
        return {"graft": "value anchor", **self.gains.describe()}


class OutputGate(Graft):
    r"""Attention returns :math:`\sigma(X W)\odot PV`, with X the input of the attention module.

    The gate's weights are drawn from N(0, std^2 / dim) when a block first runs, and kept from then on.

    Args:
        std: standard deviation of the gate's logits for an input of unit variance.
        seed: seed of the weights.
    """

    touches: ClassVar[frozenset[Place]] = frozenset({"values"})

    def __init__(self, std: float, seed: int = 0) -> None:
        super().__init__()
        self.std, self.seed = std, seed
        self.weights = nn.ParameterDict()

    def attended(self, at: Spot, heard: Attended) -> Tensor:
        """The output, gated by each token's own input."""
        if heard.read is None or heard.read.shape[1] != heard.out.shape[2]:
            raise UnsupportedOperationError(
                f"Block {at.layer}: no module is an attention by its name or class, so what it reads was not seen and "
                "cannot gate it."
            )
        _, heads, tokens, width = heard.out.shape
        gate = torch.sigmoid(heard.read @ self._weight(at, heard.read, heads * width))
        return heard.out * gate.reshape(-1, tokens, heads, width).transpose(1, 2)

    def _weight(self, at: Spot, x: Tensor, width: int) -> Tensor:
        key = f"{at.stack}/{at.layer}".replace(".", "_")
        if key not in self.weights:
            generator = torch.Generator().manual_seed(self.seed * 100_003 + len(self.weights))
            drawn = torch.randn(x.shape[-1], width, generator=generator, dtype=torch.float64)
            self.weights[key] = nn.Parameter((drawn * self.std / x.shape[-1] ** 0.5).to(x))
        weight: Tensor = self.weights[key]
        return weight

    def describe(self) -> dict[str, Any]:
        """How the gate was drawn."""
        return {"graft": "output gate", "std": self.std, "seed": self.seed}
