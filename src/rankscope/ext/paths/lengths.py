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

ORIGINS: tuple[Origin, ...] = ("embedding", "mlp", "cross_attention", "bias", "other")
_TEMPORARIES = 4
_KEPT_STREAMS = 6
_RERUN_STREAMS = 40
_RERUN_PROBABILITIES = 13


@dataclass(eq=False)
class LengthSums:
    r"""The sums :math:`S_0, \dots, S_L` while they are carried through a network. Exact.

    A source (an MLP's output, a bias) counts its length from where it enters: it joins :math:`S_0` there.

    Attributes:
        depth: number of attention layers, which is the largest length.
        sums: (lengths, batch, tokens, dim); with ``by_origin`` one for each origin.
        reached: attention layers passed so far; lengths above it are zero.
        applications: number of times an attention layer was applied to one sum.
    """

    depth: int
    by_origin: bool = False
    chunk: int | None = None
    sums: dict[Origin, Tensor] = field(default_factory=dict)
    reached: int = 0
    applications: int = 0

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
        """In place, longest first, so that the input of attention is not overwritten before it is used."""
        if self.reached + (step.heads is not None) > self.depth:
            raise InputError(f"More than {self.depth} attention layers were met; the depth was given too small.")
        # S_k becomes skip(S_k) + attention(S_{k-1}), for the lengths ``low`` to ``high`` at a time.
        high = self.reached + 1 if step.heads is not None else self.reached
        width = self.chunk or high + 1
        while high >= 0:
            low = max(high - width + 1, 0)
            new = step.passed(total[low : high + 1])
            if step.heads is not None and high > 0:
                read = total[max(low - 1, 0) : high]
                new[max(low, 1) - low :] += step.attended(read)
                self.applications += read.shape[0]
            # long paths fall below the smallest normal number, where arithmetic is slow and meaningless
            total[low : high + 1] = new.masked_fill_(new.abs() < torch.finfo(new.dtype).tiny, 0.0)
            high = low - 1

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


def theoretical_applications(depth: int) -> int:
    """Number of attention applications in the recursion: layer l is applied to the lengths 0 to l.

    Example:
        >>> theoretical_applications(48)
        1176
    """
    return depth * (depth + 1) // 2


@dataclass(frozen=True)
class MemoryPlan:
    """How to stay within a memory budget: sequences per forward pass, and sums carried through a layer at once."""

    sequences: int
    chunk: int


def plan_memory(
    budget: float | None,
    *,
    sequences: int,
    tokens: int,
    dim: int,
    depth: int,
    heads: int,
    itemsize: int,
    origins: int = 1,
    kept: bool = False,
    rerun: bool = False,
) -> MemoryPlan:
    """Fit a decomposition into ``budget`` bytes in addition to the model. Estimate.

    Each sequence needs every sum, and the probabilities and temporaries of one block.

    Args:
        budget: bytes; None for no limit.
        sequences: maximum per forward pass.
        tokens: tokens per sequence.
        dim: width of the stream.
        depth: attention layers.
        heads: heads per layer.
        itemsize: bytes per number.
        origins: number of sums that are kept separate.
        kept: marginals are computed: probabilities and sources of all blocks are kept, and a stream per head is carried
            at once.
        rerun: MLPs are linearised: a block runs again with its derivative, and its temporaries are counted as
            that of an MLP four times as wide as the stream.

    Raises:
        InputError: even one sequence with its sums carried one by one does not fit; the message says what would.
    """
    if budget is None:
        return MemoryPlan(sequences, depth + 1)
    stream = tokens * dim * itemsize
    probabilities = heads * tokens * tokens * itemsize
    fixed = (depth + 1) * stream * origins + 2 * probabilities + 8 * stream
    if kept:
        fixed += depth * (probabilities + _KEPT_STREAMS * stream) + _TEMPORARIES * heads * stream
    if rerun:
        fixed += _RERUN_PROBABILITIES * probabilities + _RERUN_STREAMS * stream
    moving = _TEMPORARIES * stream
    if fixed + moving > budget:
        need = (fixed + moving) / 2**30
        raise InputError(
            f"One sequence of {tokens} tokens needs {need:.3g} GiB beside the model, and paths_memory allows "
            f"{budget / 2**30:.3g} GiB. Allow more, or take shorter sequences."
        )
    fitting = max(1, min(sequences, int(budget // (fixed + moving * min(depth + 1, 4)))))
    chunk = int((budget / fitting - fixed) // moving)
    return MemoryPlan(fitting, max(1, min(chunk, depth + 1)))


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
