"""The base of all grafts: components that are added to a running model.

An :class:`~rankscope.surgery.operation.Operation` is a description and contains numbers only. A graft may hold tensors:
gains per layer that an optimiser can update, a gate, the values of the first layer. It is called at the places it names
in ``touches`` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from rankscope.models.view import Label, ModelView

Place = Literal["reads", "norms", "adds", "queries", "probs", "values"]
ATTENTION_PLACES: frozenset[Place] = frozenset({"queries", "probs", "values"})
Number = float | Tensor


@dataclass(frozen=True)
class Spot:
    """A block: its stack, its number from 0, and the number of blocks in the stack."""

    stack: str | None
    layer: int
    depth: int


Amount = float | Callable[[Spot], float]
"""A number for all blocks, or one that depends on the block."""


def amount_at(amount: Amount, spot: Spot) -> float:
    """The number for one block."""
    return float(amount(spot)) if callable(amount) else float(amount)


@dataclass(frozen=True)
class Mixture:
    r"""Attention as :math:`\alpha I + \beta P + \gamma U`, with U uniform over the keys each query sees.

    Attributes:
        identity: :math:`\alpha`.
        own: :math:`\beta`.
        uniform: :math:`\gamma`.
    """

    identity: Number = 0.0
    own: Number = 1.0
    uniform: Number = 0.0

    def after(self, earlier: Mixture) -> Mixture:
        """This mixture applied after another one; I and U are the same in both."""
        return Mixture(
            _plus(self.identity, self.own, earlier.identity),
            self.own * earlier.own,
            _plus(self.uniform, self.own, earlier.uniform),
        )


def _plus(number: Number, factor: Number, other: Number) -> Number:
    """``number + factor * other``; what is not there stays not there, also where the factor is one for each head."""
    return number if not isinstance(other, Tensor) and other == 0.0 else number + factor * other


@dataclass(frozen=True)
class ScoreMap:
    r"""The scores :math:`\mathrm{scale}\,QK^T` of one softmax.

    Attributes:
        query: ``batch heads query dim``.
        key: ``batch groups key dim``.
        scale: factor on their products.
    """

    query: Tensor
    key: Tensor
    scale: float


class Graft(nn.Module):
    """Base of all grafts. A subclass has a name, names its places in ``touches`` and overrides their methods.

    Axes are ``batch heads query key`` at attention, whatever the model's own order; at reads and adds they are the
    model's own, so a graft that norms channels there declares ``norms_last_axis``.
    """

    name: ClassVar[str] = ""
    touches: ClassVar[frozenset[Place]] = frozenset()
    norms_last_axis: ClassVar[bool] = False
    gains: BlockGains

    def reset(self) -> None:
        """Forget the state of a pass; called when a forward pass begins or has ended."""

    def hooks(self, view: ModelView) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Hooks on modules of the model, registered while the graft is active."""
        yield from ()

    def read(self, at: Spot, x: Tensor) -> Tensor:
        """The stream as a weight matrix reads it."""
        return x

    def norm(self, at: Spot, x: Tensor, out: Tensor, *, is_last: bool) -> Tensor:
        """The output of a norm of the stream for ``x``; ``is_last`` if no add of this block comes after it."""
        return out

    def add(self, at: Spot, label: Label, stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """The stream and the branch that are added at a skip."""
        return stream, branch

    def scores(self, at: Spot, own: ScoreMap) -> ScoreMap:
        """The scores that replace those of one softmax."""
        return own

    def mixture(self, at: Spot) -> Mixture:
        """The mixture that replaces the attention matrix."""
        return Mixture()

    def values(self, at: Spot, value: Tensor) -> Tensor:
        """The values that attention reads, ``batch groups key dim``."""
        return value

    def attended(self, at: Spot, out: Tensor, value: Tensor) -> Tensor:
        """The output of attention, ``batch heads query dim``; ``value`` has one entry per query head."""
        return out

    def describe(self) -> dict[str, Any]:
        """The graft in plain JSON types, with the values of its gains."""
        gains = self.gains.describe() if "gains" in self._modules else {}
        return {"graft": self.name or type(self).__name__, **gains}


def at_place(grafts: Sequence[Graft], place: Place) -> list[Graft]:
    """The grafts that touch a place, in order."""
    return [graft for graft in grafts if place in graft.touches]


class BlockGains(nn.Module):
    """One number per block for each name.

    Args:
        view: the model; parameters use its dtype and device.
        start: the initial value of each name, for every block or by block.
        learnable: make them parameters.

    Example:
        >>> from rankscope.models.loading import load
        >>> from rankscope.surgery.session import structure_of
        >>> view = structure_of(load("init:tiny-bert").model)
        >>> sum(p.numel() for p in BlockGains(view, {"attention": 0.0, "mlp": 0.0}, learnable=True).parameters())
        6
    """

    def __init__(self, view: ModelView, start: Mapping[str, Amount], *, learnable: bool) -> None:
        super().__init__()
        self._start = dict(start)
        self.learned = nn.ParameterDict()
        if learnable:
            like = next((p for p in view.model.parameters() if p.is_floating_point()), torch.zeros(()))
            for stack in view.stacks:
                spots = [Spot(stack.name, layer, stack.depth) for layer in range(stack.depth)]
                for name, amount in start.items():
                    row = [amount_at(amount, spot) for spot in spots]
                    values = torch.tensor(row, dtype=like.dtype, device=like.device)
                    self.learned[_key(stack.name, name)] = nn.Parameter(values)

    def at(self, spot: Spot, name: str) -> Number:
        """The number for one block."""
        key = _key(spot.stack, name)
        if key not in self.learned:
            return amount_at(self._start[name], spot)
        row: Tensor = self.learned[key]
        return row[spot.layer]

    def describe(self) -> dict[str, object]:
        """The constants, the current values of each name, or a note that a number depends on the block."""
        if not self.learned:
            return {name: "by block" if callable(amount) else float(amount) for name, amount in self._start.items()}
        return {key: [round(float(value), 6) for value in row.detach()] for key, row in self.learned.items()}


def _key(stack: str | None, name: str) -> str:
    return name if stack is None else f"{stack}/{name}".replace(".", "_")
