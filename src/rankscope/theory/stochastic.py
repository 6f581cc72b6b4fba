"""Row-stochastic matrices, dense or sparse: the attention at the collapsed point."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope._errors import InputError

DENSE_LIMIT = 2048


def dense_stochastic(P0: Any) -> Float[Tensor, "tokens tokens"]:
    """P0 in float64, rows divided by their sums, from a tensor or a scipy sparse matrix of up to 2048 tokens.

    Raises:
        InputError: not square, an entry below zero or not finite, or a row that does not sum to 1 within rounding.

    Example:
        >>> dense_stochastic(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).dtype
        torch.float64
    """
    if is_sparse(P0):
        if P0.shape[0] > DENSE_LIMIT:
            raise InputError(f"A dense matrix of {P0.shape[0]} tokens was needed. Expected at most {DENSE_LIMIT}.")
        P0 = torch.from_numpy(P0.toarray())
    if not isinstance(P0, Tensor) or P0.ndim != 2 or P0.shape[0] != P0.shape[1] or P0.shape[0] < 2:
        got = tuple(P0.shape) if isinstance(P0, Tensor) else type(P0).__name__
        raise InputError(
            f"P0 is {got}. Expected a square tensor or scipy sparse matrix of at least two tokens, row i holding what "
            "token i pays to each."
        )
    eps = torch.finfo(P0.dtype).eps if P0.is_floating_point() else 0.0
    P = P0.detach().to(torch.float64)
    check_rows(P.sum(-1), float(P.min()), 8 * P.shape[0] * eps)
    return P / P.sum(-1, keepdim=True)


def check_rows(sums: Tensor, least: float, tolerance: float) -> None:
    """Refuse what is not row-stochastic."""
    off = float((sums - 1).abs().max())
    # "not <=" so that NaN is refused too
    if not off <= tolerance or not least >= 0:
        raise InputError(
            f"P0 is not row-stochastic: a row sum is off by {off:.3g} and the least entry is {least:.3g}. Expected "
            "probabilities after softmax; with a sink outside the sequence divide each row by its sum."
        )


def is_sparse(P0: Any) -> bool:
    """Whether P0 is a scipy sparse matrix or array; scipy is not imported to find out."""
    return type(P0).__module__.startswith("scipy.sparse")


def triangle_of(P: Float[Tensor, "tokens tokens"]) -> str | None:
    """``"lower"`` or ``"upper"`` where the other triangle is empty, else None."""
    if not bool(P.triu(1).any()):
        return "lower"
    return "upper" if not bool(P.tril(-1).any()) else None


def reversing_weights(P: Float[Tensor, "tokens tokens"]) -> Float[Tensor, " tokens"] | None:
    """Weights d such that diag(d) P is symmetric, where 1 / (largest entry of each row) are such weights, else None.

    They are for a mask with a symmetric pattern and uniform rows, d being the number of neighbours, and for a symmetric
    P with equal largest entries.
    """
    d = 1 / P.amax(-1)
    weighted = d.unsqueeze(-1) * P
    off = (weighted - weighted.T).abs().max()
    return d if bool(off <= 8 * torch.finfo(torch.float64).eps) else None
