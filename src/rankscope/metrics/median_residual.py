"""The residual in the norm whose centre is the median."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens, largest
from rankscope.metrics._spec import CHANNEL_ORDER, SCALE, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"\min_x \|X - 1x^T\|_1 / \|X\|_1",
    range=(0.0, 1.0),
    at_collapse=0.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | SCALE,
    needs="order",
    reads_deviation=True,
    least_count=2,
    depends_on_length=True,
    cites=(Cite("dong2021attention"),),
)
def median_relative_residual(tokens: Tokens) -> Tensor:
    r"""Residual about the column medians in the largest-column-sum norm, :math:`\min_x \|X - 1x^T\|_1 / \|X\|_1`.

    **Exact**: in this norm the medians are a minimiser. 0 when all tokens are equal, at most 1. A single huge token
    changes a median little, unlike a mean. Slow because of sorting. Undefined for fewer than two tokens and for X = 0.

    Example:
        >>> import torch
        >>> median_relative_residual(torch.tensor([[1.0], [1.0], [2.0]])).item()
        0.25
    """
    return largest(tokens.column_median_deviation) / largest(tokens.linear_sums.column)
