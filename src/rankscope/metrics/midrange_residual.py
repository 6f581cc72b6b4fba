"""The residual in the norm whose centre is the middle of the range."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens, largest
from rankscope.metrics._spec import CHANNEL_ORDER, SCALE, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"\min_x \|X - 1x^T\|_{\max} / \|X\|_{\max}",
    range=(0.0, 1.0),
    at_collapse=0.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | SCALE,
    needs="norms",
    reads_deviation=True,
    least_count=2,
    depends_on_length=True,
    cites=(Cite("dong2021attention"),),
)
def midrange_relative_residual(tokens: Tokens) -> Tensor:
    r"""Residual about the column mid-ranges in the largest-entry norm, :math:`\min_x |X - 1x^T|_{\max} / |X|_{\max}`.

    **Exact**: in this norm the mid-ranges are a minimiser, and the residual is half the widest range of a column. 0
    when all tokens are equal, at most 1. Undefined for fewer than two tokens and for X = 0.

    Example:
        >>> import torch
        >>> midrange_relative_residual(torch.tensor([[1.0], [1.5], [2.0]])).item()
        0.25
    """
    ranges = tokens.column_ranges
    return largest(ranges.half_width) / largest(ranges.largest_entry)
