"""Distance of the tokens from being equal, in the Frobenius norm."""

from __future__ import annotations

import math

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, SHIFT, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"\|\mathrm{res}(X)\|_F",
    range=(0.0, math.inf),
    at_collapse=0.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SHIFT,
    needs="norms",
    reads_deviation=True,
    least_count=2,
    depends_on_length=True,
    cites=(Cite("dong2021attention"),),
)
def residual(tokens: Tokens) -> Tensor:
    r"""Frobenius distance from the nearest matrix of equal rows, :math:`\min_x \|X - 1x^T\|_F`.

    **Exact**: the minimiser in this norm is the mean token. From 0 (all tokens equal) up. The same number as ``mu``.
    Undefined for fewer than two tokens. It also falls if X merely shrinks: compare ``relative_residual``.

    Example:
        >>> import torch
        >>> residual(torch.tensor([[1.0, 6.0], [-1.0, 4.0]])).item()
        2.0
    """
    return tokens.energies.centred_row.sum(-1).sqrt() * tokens.scale


@token_metric(
    symbol=r"\|\mathrm{res}(X)\|_F / \|X\|_F",
    range=(0.0, 1.0),
    at_collapse=0.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="norms",
    reads_deviation=True,
    least_count=2,
    cites=(Cite("dong2021attention"),),
)
def relative_residual(tokens: Tokens) -> Tensor:
    r"""Frobenius residual over the norm, :math:`\|X - 1\bar x^T\|_F / \|X\|_F`.

    **Exact.** 0 when all tokens are equal, 1 when their mean is zero. The same number as ``mu_over_norm``.
    Undefined for fewer than two tokens and for X = 0. One huge token or channel keeps it near 1.

    Example:
        >>> import torch
        >>> round(relative_residual(torch.tensor([[7.0], [1.0]])).item(), 12)
        0.6
    """
    return tokens.relative_deviation
