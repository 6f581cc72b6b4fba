"""The residual in the composite norm of the doubly exponential bound."""

from __future__ import annotations

import math

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens, largest
from rankscope.metrics._spec import CHANNEL_ORDER, SCALE, SHIFT, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"\|\mathrm{res}(X)\|_{1,\infty}",
    range=(0.0, math.inf),
    at_collapse=0.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | SHIFT,
    needs="norms",
    reads_deviation=True,
    least_count=2,
    depends_on_length=True,
    cites=(Cite("dong2021attention"),),
)
def composite_residual(tokens: Tokens) -> Tensor:
    r"""Composite norm of the centred tokens, :math:`\sqrt{\|R\|_1\|R\|_\infty}`, :math:`R = X - 1\bar x^T`.

    **Exact** as a formula; as a distance from equal rows an upper **Bound**, because the mean is not the minimiser in
    this norm. The mean is what the published curves use. From 0 (all tokens equal) up. Undefined for fewer than two
    tokens.

    Example:
        >>> import torch
        >>> composite_residual(torch.tensor([[1.0, 1.0], [-1.0, -1.0]])).item()
        2.0
    """
    sums = tokens.linear_sums
    return _composite(sums.centred_column, sums.centred_row) * tokens.scale


@token_metric(
    symbol=r"\|\mathrm{res}(X)\|_{1,\infty} / \|X\|_{1,\infty}",
    range=(0.0, 2.0),
    at_collapse=0.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | SCALE,
    needs="norms",
    reads_deviation=True,
    least_count=2,
    cites=(Cite("dong2021attention", "fig. 2"),),
)
def relative_composite_residual(tokens: Tokens) -> Tensor:
    r"""Composite residual over the composite norm, :math:`\|R\|_{1,\infty} / \|X\|_{1,\infty}`, mean-centred.

    **Exact.** 0 when all tokens are equal. It can exceed 1, but stays below :math:`2(1 - 1/n)`: a large value indicates
    one huge token, not diversity. Undefined for fewer than two tokens and for X = 0.

    Example:
        >>> import torch
        >>> relative_composite_residual(torch.tensor([[1.0], [-1.0]])).item()
        1.0
    """
    sums = tokens.linear_sums
    return _composite(sums.centred_column, sums.centred_row) / _composite(sums.column, sums.row)


def _composite(column: Tensor, row: Tensor) -> Tensor:
    return (largest(column) * largest(row)).sqrt()
