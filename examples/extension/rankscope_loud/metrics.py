"""A metric."""

import math

from torch import Tensor

from rankscope.metrics import CHANNEL_ORDER, ROTATION, SCALE, TOKEN_ORDER, Cite, Tokens, token_metric


@token_metric(
    symbol=r"\|X\|_* / \|X\|_2",
    range=(1.0, math.inf),
    at_collapse=1.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="spectrum",
    cites=(Cite("rudelson2007sampling"),),
)
def nuclear_rank(tokens: Tokens) -> Tensor:
    r"""Nuclear over spectral norm of X, :math:`\|X\|_* / \|X\|_2`.

    **Exact.** 1 at rank one, rank(X) when all singular values are equal. Undefined for X = 0.
    """
    return tokens.singular_values.sum(-1) / tokens.singular_values[:, 0]
