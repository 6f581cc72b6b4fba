"""How far tokens point the same way."""

from __future__ import annotations

import math

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.precision import is_wide
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, SHIFT, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"\overline{\cos}(X)",
    range=(-1.0, 1.0),
    at_collapse=1.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="norms",
    least_count=2,
    cites=(Cite("ethayarajh2019contextual"),),
)
def mean_cosine(tokens: Tokens) -> Tensor:
    r"""Mean cosine of pairs of different tokens, :math:`(\|\sum_i u_i\|^2 - n) / (n(n-1))`, :math:`u_i = x_i/\|x_i\|`.

    **Exact**, without forming pairs. 1 when all tokens point the same way, 0 for random directions, at least
    :math:`-1/(n-1)`. Zero tokens have no direction and are excluded; undefined with fewer than two others, and if a
    token is so much smaller than the largest (2^1022) that float64 cannot represent both. A common
    offset raises it without any collapse: compare ``centred_mean_cosine``.

    Example:
        >>> import torch
        >>> mean_cosine(torch.tensor([[1.0, 0.0], [0.0, 3.0]])).item()
        0.0
    """
    sums = tokens.linear_sums
    mean = _mean_over_pairs(sums.direction, sums.row)
    if not is_wide(tokens.dtype):
        return mean
    # If another token is 2^1022 times as large, a token underflows to zero in every unit and has no direction.
    return mean.masked_fill((sums.row > 0).sum(-1) != tokens.directed, math.nan)


@token_metric(
    symbol=r"\overline{\cos}(CX)",
    range=(-1.0, 1.0),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE | SHIFT,
    needs="norms",
    reads_deviation=True,
    least_count=2,
    cites=(Cite("mu2018allbutthetop"),),
)
def centred_mean_cosine(tokens: Tokens) -> Tensor:
    r"""Mean cosine over pairs of different tokens after subtracting their mean.

    **Exact.** Near :math:`-1/(n-1)` for tokens without structure; above it when few directions, or one huge token, are
    left. Undefined when all tokens are equal: nothing is left to have a direction.

    Example:
        >>> import torch
        >>> centred_mean_cosine(torch.tensor([[3.0, 5.0], [3.0, 7.0]])).item()
        -1.0
    """
    return _mean_over_pairs(tokens.linear_sums.centred_direction, tokens.linear_sums.centred_row)


def _mean_over_pairs(unit_sum: Tensor, row_sum: Tensor) -> Tensor:
    n = (row_sum > 0).sum(-1)
    return ((unit_sum.square().sum(-1) - n) / (n * (n - 1))).masked_fill(n < 2, math.nan)
