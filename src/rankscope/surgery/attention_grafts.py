"""Grafts inside attention: on its queries and keys, its scores, its matrix, its values and its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rankscope.errors import UnsupportedOperationError
from rankscope.linalg.precision import widest
from rankscope.models.view import ModelView
from rankscope.surgery.graft import (
    Amount,
    Attended,
    BlockGains,
    Graft,
    Mixture,
    Number,
    Place,
    ScoreMap,
    Spot,
    amount_at,
)
from rankscope.surgery.mode import normed

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
    r"""Scores times :math:`s\,g(n)`, with n the number of keys a query sees.

    Args:
        view: the model.
        scale: s.
        growth: g, for a tensor of numbers of keys; the logarithm by default.
        learnable: make s a parameter, one per block.
    """

    touches: ClassVar[frozenset[Place]] = frozenset({"scores"})

    def __init__(
        self, view: ModelView, scale: float, *, growth: Callable[[Tensor], Tensor] = torch.log, learnable: bool = False
    ) -> None:
        super().__init__()
        self.gains = BlockGains(view, {"scale": scale}, learnable=learnable)
        self._growth = growth

    def score_gain(self, at: Spot, keys: Tensor) -> Number:
        """The factor s g(n), in a row that sees no key that of one key."""
        return self.gains.at(at, "scale") * self._growth(keys.clamp(min=1).to(widest(keys.device)))

    def describe(self) -> dict[str, Any]:
        """The scale."""
        return {"graft": "length scale", **self.gains.describe()}


class _GainedNorm(Graft):
    """A norm inside attention, times a gain g.

    Args:
        view: the model.
        gain: g.
        learnable: make it a parameter, one per block.
    """

    called: ClassVar[str]

    def __init__(self, view: ModelView, gain: float, *, learnable: bool = False) -> None:
        super().__init__()
        self.gains = BlockGains(view, {"gain": gain}, learnable=learnable)

    def describe(self) -> dict[str, Any]:
        """The gain."""
        return {"graft": self.called, **self.gains.describe()}


class QueryKeyNorm(_GainedNorm):
    r"""Scores :math:`g\sqrt{d}\cos(q_i, k_j)`: queries and keys of each head with root mean square 1, times g.

    Whatever scale the model had on its scores is replaced. Rotary positions leave lengths alone, so the norm may come
    after them.
    """

    called: ClassVar[str] = "query-key norm"
    touches: ClassVar[frozenset[Place]] = frozenset({"queries"})

    def maps(self, at: Spot, own: ScoreMap) -> tuple[ScoreMap, ...]:
        """The same softmax over normed queries and keys; a zero query stays zero."""
        query, key = (normed(x, x, "scale") for x in (own.query, own.key))
        return (ScoreMap(self.gains.at(at, "gain") * query, key, query.shape[-1] ** 0.5),)


class ScoreCap(Graft):
    r"""Scores as :math:`c\tanh(s/c)`, so that none is larger than c.

    Args:
        cap: c.
    """

    touches: ClassVar[frozenset[Place]] = frozenset({"logits"})

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def logits(self, at: Spot, scores: Tensor) -> Tensor:
        """The capped scores."""
        return self.cap * torch.tanh(scores / self.cap)

    def describe(self) -> dict[str, Any]:
        """The cap."""
        return {"graft": "score cap", "cap": self.cap}


class DifferentialMaps(Graft):
    r"""Attention as :math:`P_1 - \lambda P_2`, the softmaxes of the two halves of every query and key.

    Each head's output is divided by its root mean square and multiplied by a factor afterwards, as in the paper.

    Args:
        share: lambda, by block.
        output: the factor on the output, by block.
    """

    touches: ClassVar[frozenset[Place]] = frozenset({"queries", "values"})

    def __init__(self, share: Amount, output: Amount) -> None:
        super().__init__()
        self.share, self.output = share, output

    def maps(self, at: Spot, own: ScoreMap) -> tuple[ScoreMap, ...]:
        """Two softmaxes, over half as many channels each."""
        width = own.query.shape[-1]
        if width % 2:
            raise UnsupportedOperationError(
                f"Block {at.layer} has heads of odd width {width}: they cannot be split into two."
            )
        first, second = slice(0, width // 2), slice(width // 2, width)
        scale = own.scale * 2**0.5
        return (
            ScoreMap(own.query[..., first], own.key[..., first], scale),
            ScoreMap(own.query[..., second], own.key[..., second], scale, -amount_at(self.share, at)),
        )

    def attended(self, at: Spot, heard: Attended) -> Tensor:
        """Each head's output, normed and scaled."""
        return amount_at(self.output, at) * normed(heard.out, heard.out, "rms")

    def describe(self) -> dict[str, Any]:
        """The graft in plain JSON types."""
        return {"graft": "differential maps", "share": "by block", "output": "by block"}


class OutputNorm(_GainedNorm):
    r"""Attention returns :math:`g\,\mathrm{LN}(PV)`, all heads of a token together, before the output weights.

    The norm has no weights and no epsilon: long contexts make PV small, and an epsilon would let that through.
    """

    called: ClassVar[str] = "output norm"
    touches: ClassVar[frozenset[Place]] = frozenset({"values"})

    def attended(self, at: Spot, heard: Attended) -> Tensor:
        """The normed output."""
        batch, heads, tokens, width = heard.out.shape
        joint = heard.out.transpose(1, 2).reshape(batch, tokens, heads * width)
        joint = joint - joint.mean(dim=-1, keepdim=True)
        joint = self.gains.at(at, "gain") * normed(joint, joint, "rms")
        return joint.view(batch, tokens, heads, width).transpose(1, 2)


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
            self.weights[key] = nn.Parameter((drawn * self.std / x.shape[-1] ** 0.5).to(x.dtype).to(x.device))
        weight: Tensor = self.weights[key]
        return weight

    def describe(self) -> dict[str, Any]:
        """How the gate was drawn."""
        return {"graft": "output gate", "std": self.std, "seed": self.seed}
