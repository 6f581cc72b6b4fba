"""Number of directions in which tokens differ visibly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, TOKEN_ORDER, token_metric

VISIBLE = 0.01


@token_metric(
    symbol=r"\sum_i [s_i(CX) > 0.01\, s_1(X)]",
    range=(0.0, math.inf),
    at_collapse=0.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="spectrum",
    reads_deviation=True,
    least_count=2,
    depends_on_length=True,
    cites=(Cite("cirrincione2026rank"),),
)
def affine_rank(tokens: Tokens) -> Tensor:
    r"""Directions in which tokens differ by more than 1% of the stream, :math:`\sum_i [s_i(CX) > 0.01\,s_1(X)]`.

    **Exact**, and an integer, so it is not continuous. The affine rank of the paper is the rank of CX, the dimension of
    the smallest flat that contains all tokens. For activations that is min(n - 1, d) up to rounding, so a count needs a
    threshold. Here it is relative to X and not to CX: when tokens become alike, the count falls to 0, while
    the centred ranks, which are relative to CX, stay as high as noise. Undefined for X = 0 and for one token.

    Example:
        >>> import torch
        >>> affine_rank(torch.tensor([[5.0, 1.0], [5.0, -1.0]])).item()
        1.0
        >>> affine_rank(torch.tensor([[5.0, 0.01], [5.0, -0.01]])).item()
        0.0
    """
    largest = tokens.singular_values[:, :1]
    count = (tokens.centred_singular_values > VISIBLE * largest).sum(-1).double()
    return torch.where(largest[:, 0] > 0, count, math.nan)
