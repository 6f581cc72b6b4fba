"""Number of directions that carry the energy, counted against the strongest."""

from __future__ import annotations

import math

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, SHIFT, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"\mathrm{sr}(X)",
    range=(1.0, math.inf),
    at_collapse=1.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="spectrum",
    depends_on_length=True,
    estimate=True,
    cites=(Cite("rudelson2007sampling"),),
)
def stable_rank(tokens: Tokens) -> Tensor:
    r"""Squared Frobenius over squared spectral norm of X, :math:`\|X\|_F^2 / \|X\|_2^2` (of X, not of :math:`XX^T`).

    **Exact.** 1 at rank one, rank(X) when all singular values are equal. Undefined for X = 0.
    ``measure`` takes it from 1,024 evenly spaced tokens if both n and d are above 1024.

    Example:
        >>> import torch
        >>> stable_rank(torch.eye(3)).item()
        3.0
    """
    return _energy_over_largest(tokens.singular_values)


@token_metric(
    symbol=r"\mathrm{sr}(CX)",
    range=(1.0, math.inf),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE | SHIFT,
    needs="spectrum",
    reads_deviation=True,
    least_count=2,
    depends_on_length=True,
    estimate=True,
    cites=(Cite("rudelson2007sampling"),),
)
def centred_stable_rank(tokens: Tokens) -> Tensor:
    r"""Stable rank after subtracting the mean token, :math:`\|CX\|_F^2 / \|CX\|_2^2`.

    **Exact.** Blind to the mean token, and so to token uniformity: collapsed tokens whose differences are noise read as
    high as noise. Undefined when all tokens are equal.
    ``measure`` takes it from 1,024 evenly spaced tokens if both n and d are above 1024.

    Example:
        >>> import torch
        >>> centred_stable_rank(torch.tensor([[5.0, 1.0], [5.0, -1.0]])).item()
        1.0
    """
    return _energy_over_largest(tokens.centred_singular_values)


def _energy_over_largest(singular_values: Tensor) -> Tensor:
    return (singular_values / singular_values[:, :1]).square().sum(-1)
