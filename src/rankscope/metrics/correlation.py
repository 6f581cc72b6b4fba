"""Mean overlap of tokens, the variable of signal propagation at initialisation."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"\rho(X)",
    range=(-1.0, 1.0),
    at_collapse=1.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="norms",
    least_count=2,
    cites=(Cite("noci2022signal"),),
)
def correlation(tokens: Tokens) -> Tensor:
    r"""Mean inner product of different tokens over their mean square.

    .. math:: \rho = \frac{\sum_{k\ne k'}\langle x_k, x_{k'}\rangle}{(n-1)\sum_k\|x_k\|^2}
              = 1 - \frac{n}{n-1}\frac{\|CX\|_F^2}{\|X\|_F^2}

    **Exact**, by the second form, which loses no digits near collapse. 1 when all tokens are equal, 0 when
    uncorrelated, at least :math:`-1/(n-1)`. Long tokens weigh more than in ``mean_cosine``. Undefined for fewer than
    two tokens and for X = 0.

    Example:
        >>> import torch
        >>> correlation(torch.tensor([[1.0, 0.0], [1.0, 0.0]])).item()
        1.0
    """
    n = tokens.count
    return 1.0 - n / (n - 1) * tokens.relative_deviation.square()
