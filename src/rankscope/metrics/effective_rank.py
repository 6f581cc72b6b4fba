"""Number of directions in use, by entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, SHIFT, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"\mathrm{erank}(X)",
    range=(1.0, math.inf),
    at_collapse=1.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="spectrum",
    depends_on_length=True,
    estimate=True,
    cites=(Cite("roy2007effective"),),
)
def effective_rank(tokens: Tokens) -> Tensor:
    r"""Exponential of the entropy of the singular values, :math:`e^{H(p)}`, :math:`p_i = s_i/\sum_j s_j`.

    **Exact.** Singular values themselves, not their squares. 1 at rank one, rank(X) when all are equal.
    Undefined for X = 0. For float32 and narrower input the smallest singular values come from a Gram matrix; near
    collapse that adds a relative error of up to 5e-8 min(n, d).
    ``measure`` takes it from 1,024 evenly spaced tokens if both n and d are above 1024.

    Example:
        >>> import torch
        >>> round(effective_rank(torch.eye(3)).item(), 12)
        3.0
    """
    return _exp_entropy(tokens.singular_values)


@token_metric(
    symbol=r"\mathrm{erank}(CX)",
    range=(1.0, math.inf),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE | SHIFT,
    needs="spectrum",
    reads_deviation=True,
    least_count=2,
    depends_on_length=True,
    estimate=True,
    cites=(Cite("roy2007effective"),),
)
def centred_effective_rank(tokens: Tokens) -> Tensor:
    r"""Effective rank after subtracting the mean token.

    **Exact.** Blind to the mean token, and so to token uniformity: collapsed tokens whose differences are noise read as
    high as noise. Undefined when all tokens are equal.
    ``measure`` takes it from 1,024 evenly spaced tokens if both n and d are above 1024.

    Example:
        >>> import torch
        >>> centred_effective_rank(torch.tensor([[5.0, 1.0], [5.0, -1.0]])).item()
        1.0
    """
    return _exp_entropy(tokens.centred_singular_values)


def _exp_entropy(singular_values: Tensor) -> Tensor:
    p = singular_values / singular_values.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return entropy.exp()
