"""The size of the stream."""

from __future__ import annotations

import math

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"\|X\|_F / \sqrt{nd}",
    range=(0.0, math.inf),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION,
    needs="norms",
    cites=(Cite("xiong2020layer"), Cite("sun2025curse")),
)
def stream_rms(tokens: Tokens) -> Tensor:
    r"""Root mean square of the entries, :math:`\|X\|_F / \sqrt{nd}`.

    **Exact.** 0 for X = 0. In a pre-norm network it grows with depth, and later blocks write relatively less; see
    ``write_ratio``. One massive token dominates it: compare ``largest_token_share``. Undefined without tokens.

    Example:
        >>> import torch
        >>> stream_rms(torch.tensor([[3.0, -3.0], [3.0, 3.0]])).item()
        3.0
    """
    return (tokens.energies.row.sum(-1) / (tokens.count * tokens.dim)).sqrt() * tokens.scale
