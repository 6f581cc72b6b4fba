"""Whether one token outweighs the others."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens, largest
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"\max_i \|x_i\|^2 / \|X\|_F^2",
    range=(0.0, 1.0),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="norms",
    cites=(Cite("sun2024massive"),),
)
def largest_token_share(tokens: Tokens) -> Tensor:
    r"""Share of the squared norm held by the largest token, :math:`\max_i \|x_i\|^2 / \|X\|_F^2`.

    **Exact.** From 1/n (all tokens equally long, collapse included) to 1 (one token holds everything: other numbers
    then describe that token). Undefined for X = 0.

    Example:
        >>> import torch
        >>> largest_token_share(torch.tensor([[1.0, 1.0], [1.0, -1.0]])).item()
        0.5
    """
    return largest(tokens.energies.row) / tokens.energies.row.sum(-1)
