"""Whether one channel outweighs the others."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens, largest
from rankscope.metrics._spec import CHANNEL_ORDER, SCALE, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"\max_c \|X_{:c}\|^2 / \|X\|_F^2",
    range=(0.0, 1.0),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | SCALE,
    needs="norms",
    cites=(Cite("kovaleva2021bert"),),
)
def largest_channel_share(tokens: Tokens) -> Tensor:
    r"""Share of the squared norm held by the largest channel, :math:`\max_c \|X_{:c}\|^2 / \|X\|_F^2`.

    **Exact.** From 1/d (all channels equal) to 1 (one channel holds everything: ranks are then 1 although tokens
    may differ). Undefined for X = 0.

    Example:
        >>> import torch
        >>> largest_channel_share(torch.tensor([[1.0, 1.0], [1.0, -1.0]])).item()
        0.5
    """
    return largest(tokens.energies.channel) / tokens.energies.channel.sum(-1)
