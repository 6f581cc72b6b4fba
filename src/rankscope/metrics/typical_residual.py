"""How far apart a typical pair of tokens is, regardless of a few huge tokens or channels."""

from __future__ import annotations

import math

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, SCALE, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"\mathrm{med}_{i<j}\,\delta_{ij}/\sqrt2",
    range=(0.0, math.sqrt(2.0)),
    at_collapse=0.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | SCALE,
    needs="gram",
    least_count=2,
    cites=(Cite("dong2021attention"), Cite("sun2024massive")),
)
def typical_residual(tokens: Tokens) -> Tensor:
    r"""Median distance of two tokens, :math:`\mathrm{med}_{i<j} \|x_i - x_j\| / (\sqrt2 \max(\|x_i\|, \|x_j\|))`.

    **Exact** for up to 128 tokens; longer sequences use 128 evenly spaced ones. 0 when all tokens are equal, about
    the relative residual if tokens are homogeneous (1 for random tokens). Unlike it, this does not change if a few
    tokens or channels are huge: channels with more than 100 times the median energy are first scaled down to that.
    Undefined for fewer than two tokens and for X = 0.

    Example:
        >>> import torch
        >>> round(typical_residual(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).item(), 12)
        1.0
    """
    return tokens.pairs.distance / math.sqrt(2.0)


@token_metric(
    symbol=r"\mathrm{med}_{i<j} \|u_i - u_j\|/\sqrt2",
    range=(0.0, math.sqrt(2.0)),
    at_collapse=0.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | SCALE,
    needs="gram",
    least_count=2,
    cites=(Cite("ethayarajh2019contextual"),),
)
def direction_residual(tokens: Tokens) -> Tensor:
    r"""Median distance of the directions of two tokens, :math:`\mathrm{med}_{i<j} \|u_i - u_j\|/\sqrt2`.

    **Exact** for up to 128 tokens; longer sequences use 128 evenly spaced ones. :math:`\sqrt{1 - \cos}` of the
    median pair: 0 when all tokens point the same way, whatever their lengths, 1 for random directions. Outlier channels
    are scaled down as in ``typical_residual``. Zero tokens have no direction and are excluded; undefined with fewer
    than two others.

    Example:
        >>> import torch
        >>> direction_residual(torch.tensor([[1.0, 1.0], [7.0, 7.0]])).item()
        0.0
    """
    return tokens.pairs.direction / math.sqrt(2.0)
