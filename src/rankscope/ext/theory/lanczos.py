r"""Largest and smallest gain of a linear map on centred matrices, by Lanczos on its normal operator. Ours.

Golub-Kahan bidiagonalisation with full reorthogonalisation; the map is only applied, never formed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope._citations import Cite
from rankscope.errors import InputError
from rankscope.linalg.scaled import centred

LinearMap = Callable[[Tensor], Tensor]

RANDOM_START = Cite("kuczynski1992estimating")
_ROUNDING = 8 * torch.finfo(torch.float64).eps
_INVARIANT = 1e-12
"""Relative length of the next direction below which the span is invariant: the rest is rounding."""
FAILURE = 1e-12
"""Probability, over the random start, that ``LanczosEnds.likely_upper`` is too small."""


@dataclass(frozen=True)
class LanczosEnds:
    r"""Largest and smallest gain according to Lanczos.

    Attributes:
        largest: **Estimate** from below: never larger than the true largest gain.
        likely_upper: upper **Bound** that fails with probability at most :data:`FAILURE` over the random start.
        smallest: **Estimate** from above, the smallest gain found; the true smallest may be far below.
        error: relative backward error of ``largest``; small once it has converged.
        steps: number of steps.
    """

    largest: float
    likely_upper: float
    smallest: float
    error: float
    steps: int


def lanczos_ends(
    apply: LinearMap,
    transpose: LinearMap,
    tokens: int,
    dim: int,
    *,
    steps: int = 60,
    seed: int = 0,
    device: torch.device | None = None,
) -> LanczosEnds:
    r"""Largest and smallest gain of a linear map on centred (tokens, dim) matrices.

    With a start drawn uniformly from the sphere in N dimensions, the largest Ritz value :math:`\theta` after k steps
    falls short of the largest eigenvalue by a relative error above :math:`\epsilon` with probability at most
    :math:`1.648\sqrt N e^{-(2k-1)\sqrt\epsilon}` (Kuczynski and Wozniakowski), for any map. ``likely_upper`` is
    :math:`\sqrt{\theta/(1-\epsilon)}` at the :math:`\epsilon` that makes this 1e-12; inf when k is too small for one.

    Args:
        apply: the map, in float64.
        transpose: its transpose.
        tokens: rows.
        dim: columns.
        steps: applications of each.
        seed: seed of the start.
        device: device of the map; None for the CPU. The start does not depend on it.

    Raises:
        InputError: fewer than two tokens, or no step.

    Example:
        >>> scale = torch.diag(torch.tensor([3.0, 1.0, 0.5]).double())
        >>> found = lanczos_ends(lambda R: R @ scale, lambda R: R @ scale, 3, 3, steps=6)
        >>> round(found.largest, 9), round(found.smallest, 9)
        (3.0, 0.5)
    """
    if tokens < 2 or steps < 1:
        raise InputError(f"{tokens} tokens and {steps} Lanczos steps: expected at least two tokens and one step.")
    drawn = torch.randn(tokens, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    start = centred(drawn.to(device))
    size = (tokens - 1) * dim
    diagonal, off, whole = _bidiagonal(apply, transpose, start, min(steps, size))
    taken = diagonal.numel()
    bidiagonal = torch.diag(diagonal)
    bidiagonal[torch.arange(taken - 1), torch.arange(1, taken)] = off[:-1]
    left, values, _ = torch.linalg.svd(bidiagonal)
    largest = float(values[0])
    miss = abs(float(off[-1] * left[-1, 0]))
    error = miss / largest if largest > 0 else 0.0
    room = 1.0 + 1e3 * _INVARIANT if whole else _room(size, taken)
    return LanczosEnds(largest, largest * room * (1 + _ROUNDING * taken), float(values[-1]), error, taken)


def _room(size: int, steps: int) -> float:
    """How much the largest gain may exceed the one found."""
    share = (math.log(1.648 * math.sqrt(size) / FAILURE) / (2 * steps - 1)) ** 2
    return math.inf if share >= 1 else (1 - share) ** -0.5


def _bidiagonal(apply: LinearMap, transpose: LinearMap, start: Tensor, steps: int) -> tuple[Tensor, Tensor, bool]:
    """Diagonal, off-diagonal (its last entry is the residual), and whether the span is invariant."""
    right, left = start.new_zeros(steps + 1, start.numel()), start.new_zeros(steps, start.numel())
    right[0] = (start / torch.linalg.vector_norm(start)).flatten()
    diagonal, off = start.new_zeros(steps), start.new_zeros(steps)
    top = 0.0
    for k in range(steps):
        moved = _orthogonal(centred(apply(right[k].view_as(start))), left[:k])
        diagonal[k] = length = float(torch.linalg.vector_norm(moved))
        top = max(top, length)
        if length <= _INVARIANT * top:
            return diagonal[: k + 1], off[: k + 1], True
        left[k] = moved / length
        back = _orthogonal(centred(transpose(left[k].view_as(start))), right[: k + 1])
        length = float(torch.linalg.vector_norm(back))
        if length <= _INVARIANT * top:
            return diagonal[: k + 1], off[: k + 1], True
        off[k], top = length, max(top, length)
        right[k + 1] = back / length
    return diagonal, off, steps == start.numel() - start.shape[-1]


def _orthogonal(matrix: Tensor, basis: Tensor) -> Tensor:
    """The part of a centred matrix orthogonal to a basis, flat; the second pass removes the rounding of the first."""
    for _ in range(2):
        flat = matrix.flatten()
        matrix = centred((flat - basis.T @ (basis @ flat)).view_as(matrix))
    return matrix.flatten()
