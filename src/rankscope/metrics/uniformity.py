"""How evenly the directions of the tokens cover the sphere."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.pairs import normalised
from rankscope.linalg.precision import is_wide
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, TOKEN_ORDER, token_metric

T = 2.0
"""The t of the paper."""
MOST_TOKENS = 2048
_PAIRS_AT_ONCE = 1 << 19


@token_metric(
    symbol=r"\log\overline{e^{-2\|u_i-u_j\|^2}}",
    range=(-4.0 * T, 0.0),
    at_collapse=0.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="gram",
    least_count=2,
    cites=(Cite("wang2020understanding"),),
)
def uniformity(tokens: Tokens) -> Tensor:
    r"""Log of the mean Gaussian potential of pairs of directions, :math:`\log \mathrm{mean}_{i<j} e^{-2\|u_i-u_j\|^2}`.

    **Exact**, over all pairs, for up to 2,048 tokens; longer sequences use 2,048 evenly spaced ones. With
    :math:`u_i = x_i/\|x_i\|`. 0 when all tokens point the same way, about -4 for random directions in many dimensions,
    at least -8. Its rounding error is absolute, below 1e-14: nearer to 0 than that, only the nearness is known. Zero
    tokens have no direction and are excluded; undefined with fewer than two others, and if a token is so much smaller
    than the largest (2^1022) that float64 cannot represent both.

    Example:
        >>> import torch
        >>> uniformity(torch.tensor([[1.0, 0.0], [-3.0, 0.0]])).item()
        -8.0
    """
    parts = [_potential(tokens, group) for group in tokens.groups()] if tokens.tokens else []
    potential = torch.cat(parts) if parts else tokens.zeros() * math.nan
    if is_wide(tokens.dtype):
        potential = potential.masked_fill((tokens.linear_sums.row > 0).sum(-1) != tokens.directed, math.nan)
    return potential


def _potential(tokens: Tokens, group: slice) -> Tensor:
    size = min(tokens.tokens, MOST_TOKENS)
    X, known = tokens.sample(group, size)
    U, length = normalised(X)
    directed = ((length > 0) if known is None else (length > 0) & known).to(U.dtype)
    total = U.new_zeros(len(U))
    step = max(1, _PAIRS_AT_ONCE // (len(U) * size))
    for start in range(0, size, step):
        rows = slice(start, start + step)
        # |u - v|^2 = 2 - 2 u.v; its rounding is absolute, and so is that of the exponential near collapse.
        apart = torch.bmm(U[:, rows], U.mT).mul_(-2.0).add_(2.0).clamp_(min=0.0)
        near = apart.mul_(-T).exp_()
        near.diagonal(start, dim1=-2, dim2=-1).zero_()  # a token is not a pair
        total += torch.einsum("sij,si,sj->s", near, directed[:, rows], directed)
    count = directed.sum(-1)
    return (total / (count * (count - 1))).log().clamp_max(0.0).masked_fill(count < 2, math.nan)
