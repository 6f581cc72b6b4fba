r"""All paths of each length, in polynomial time.

With attention and norms frozen the stream is a sum over paths, and the sum :math:`S_k` of those that went through k
attention layers obeys :math:`S_k \leftarrow S_k + \sum_h P_h S_{k-1} W_h`, block by block, k downwards.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankscope.errors import InputError
from rankscope.ext.paths.network import FrozenBlock, FrozenNetwork, FrozenStep, Origin


@dataclass(eq=False)
class LengthSums:
    r"""The sums :math:`S_0, \dots, S_L` while they are carried through a network. Exact.

    A source (an MLP's output, a bias) counts its length from where it enters: it joins :math:`S_0` there.

    Attributes:
        depth: number of attention layers, which is the largest length.
        sums: (lengths, batch, tokens, dim); with ``by_origin`` one for each origin.
        reached: attention layers passed so far; lengths above it are zero.
    """

    depth: int
    by_origin: bool = False
    sums: dict[Origin, Tensor] = field(default_factory=dict)
    reached: int = 0

    def begin(self, entry: Tensor) -> None:
        """The stream that enters the first block has length 0."""
        self.reached = 0
        self.sums = {}
        self._sum("embedding", entry)[0] += entry

    def _sum(self, origin: Origin, like: Tensor) -> Tensor:
        key: Origin = origin if self.by_origin else "embedding"
        if key not in self.sums:
            self.sums[key] = like.new_zeros((self.depth + 1, *like.shape))
        return self.sums[key]

    def through(self, block: FrozenBlock) -> None:
        """Carry every sum through a block."""
        for step in block.steps:
            self.step(step)

    def step(self, step: FrozenStep) -> None:
        """Carry every sum through a step; attention increases the length by one."""
        self.carry(step)
        for origin, constant in step.constants():
            self._sum(origin, constant)[0] += constant

    def carry(self, step: FrozenStep) -> None:
        """Carry every sum through a step, without the sources that enter there."""
        for total in self.sums.values():
            self._carry(step, total)
        self.reached += step.heads is not None

    def _carry(self, step: FrozenStep, total: Tensor) -> None:
        if self.reached + (step.heads is not None) > self.depth:
            raise InputError(f"More than {self.depth} attention layers were met; the depth was given too small.")
        # S_k becomes skip(S_k) + attention(S_{k-1})
        longest = self.reached + (step.heads is not None)
        new = step.passed(total[: longest + 1])
        if step.heads is not None:
            new[1:] += step.attended(total[:longest])
        # long paths fall below the smallest normal number, where arithmetic is slow and meaningless
        total[: longest + 1] = new.masked_fill_(new.abs() < torch.finfo(new.dtype).tiny, 0.0)

    @property
    def by_length(self) -> Tensor:
        """All origins together: (lengths, batch, tokens, dim)."""
        parts = list(self.sums.values())
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)

    def error(self, out: Tensor, keep: Tensor | None = None) -> float:
        """Norm of ``sum of all lengths - out`` relative to ``out``, in float64, for the worst sequence."""
        return relative_error(self.by_length, out, keep)


def relative_error(sums: Tensor, out: Tensor, keep: Tensor | None = None) -> float:
    """Largest relative distance, over sequences, between the sum over lengths and the stream itself."""
    total = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    for part in sums:
        total += part
    wanted = out.double()
    if keep is not None:
        total, wanted = total * keep[..., None], wanted * keep[..., None]
    distance = torch.linalg.vector_norm(total - wanted, dim=(-2, -1))
    size = torch.linalg.vector_norm(wanted, dim=(-2, -1))
    return float(torch.where(distance > 0, distance / size, 0.0).max())


def length_sums(network: FrozenNetwork, *, by_origin: bool = False) -> LengthSums:
    """The sums at the end of a frozen network."""
    sums = LengthSums(len(network.attention), by_origin)
    sums.begin(network.entry)
    for step in network.steps:
        sums.step(step)
    return sums


def lengths_of_interest(depth: int, wanted: Collection[int] | None) -> list[int]:
    """Lengths to report: all, or the requested ones.

    Raises:
        InputError: a length that no path has.
    """
    if wanted is None:
        return list(range(depth + 1))
    beyond = sorted(k for k in wanted if not 0 <= k <= depth)
    if beyond:
        raise InputError(f"lengths={beyond}: paths of this model have lengths 0 to {depth}.")
    return sorted(set(wanted))
