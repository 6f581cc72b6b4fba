"""Eigenvectors of triangular stochastic matrices, where entries may grow by more than a float can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_LARGE = 1e100


class TriangularMode(NamedTuple):
    """Second eigenvalue of a lower triangular stochastic matrix with a right and a left vector."""

    eigenvalue: float
    right: Float[Tensor, " tokens"]
    left: Float[Tensor, " tokens"]


def lower_second_mode(
    diagonal: Float[Tensor, " tokens"],
    row_times: Callable[[int, Tensor], Tensor],
    column_times: Callable[[int, Tensor], Tensor],
) -> TriangularMode:
    """The largest diagonal entry after the first, and its vectors by substitution; only products with L are asked for.

    Row 0 of a lower triangular stochastic matrix is (1, 0, ...): that eigenvalue is the all-ones vector's.

    Args:
        diagonal: of L.
        row_times: row i of L times a vector.
        column_times: column i of L times a vector.

    Example:
        >>> L = torch.tensor([[1.0, 0.0], [0.75, 0.25]], dtype=torch.float64)
        >>> mode = lower_second_mode(L.diagonal(), lambda i, v: L[i] @ v, lambda i, v: L[:, i] @ v)
        >>> mode.eigenvalue, mode.right.tolist(), mode.left.tolist()
        (0.25, [0.0, 1.0], [-1.0, 1.0])
    """
    n = diagonal.shape[0]
    second = diagonal[1:].max()
    places = (diagonal == second).nonzero().squeeze(-1)
    first, last = int(places[places > 0][0]), int(places[-1])
    right = _substituted(diagonal, row_times, last, range(last + 1, n))
    left = _substituted(diagonal, column_times, first, range(first - 1, -1, -1))
    return TriangularMode(float(second), right, left)


def _substituted(diagonal: Tensor, times: Callable[[int, Tensor], Tensor], start: int, order: range) -> Tensor:
    v = torch.zeros_like(diagonal)
    v[start] = 1.0
    for i in order:
        # v[i] is still 0, so the diagonal takes no part in the product
        rest = float(times(i, v))
        # only a second token that sees nothing but itself has no gap to the first, and then there is no rest either
        v[i] = rest / float(diagonal[start] - diagonal[i]) if rest != 0 else 0.0
        if abs(float(v[i])) > _LARGE:
            v = v / float(v[i].abs())
    return v
