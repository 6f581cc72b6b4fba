"""Numbers per block: constants, or parameters that an optimiser can move."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rankscope.models.view import ModelView
from rankscope.surgery.graft import Amount, Number, Spot, amount_at


class Gains(nn.Module):
    """One number per block for each name.

    Args:
        view: the model; parameters take its dtype and device.
        start: the value each name has at first, in every block or by block.
        learnable: make them parameters.

    Example:
        >>> from rankscope.models.loading import load
        >>> from rankscope.surgery.session import structure_of
        >>> view = structure_of(load("init:tiny-bert").model)
        >>> sum(p.numel() for p in Gains(view, {"attention": 0.0, "mlp": 0.0}, learnable=True).parameters())
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
        """The number of one block."""
        key = _key(spot.stack, name)
        if key not in self.learned:
            return amount_at(self._start[name], spot)
        row: Tensor = self.learned[key]
        return row[spot.layer]

    def describe(self) -> dict[str, object]:
        """Constants, the present values of each name, or that a number depends on the block."""
        if not self.learned:
            return {name: "by block" if callable(amount) else float(amount) for name, amount in self._start.items()}
        return {key: [round(float(value), 6) for value in row.detach()] for key, row in self.learned.items()}


def _key(stack: str | None, name: str) -> str:
    return name if stack is None else f"{stack}/{name}".replace(".", "_")
