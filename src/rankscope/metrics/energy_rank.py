"""Number of directions that hold 99% of the energy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, SHIFT, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"r_{99}(X)",
    range=(1.0, math.inf),
    at_collapse=1.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="spectrum",
    depends_on_length=True,
    estimate=True,
    cites=(Cite("jolliffe2002principal", "sec. 6.1.1"),),
)
def energy_rank_99(tokens: Tokens) -> Tensor:
    r"""Fewest directions that hold 99% of the energy, :math:`\min\{k : \sum_{i\le k} s_i^2 \ge 0.99 \sum_i s_i^2\}`.

    **Exact**, and an integer, so it is not continuous. 1 at rank one. Undefined for X = 0.
    ``measure`` takes it from 1,024 evenly spaced tokens if both n and d are above 1024.

    Example:
        >>> import torch
        >>> energy_rank_99(torch.eye(3)).item()
        3.0
    """
    return _count_to_99(tokens.singular_values)


@token_metric(
    symbol=r"r_{99}(CX)",
    range=(1.0, math.inf),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE | SHIFT,
    needs="spectrum",
    reads_deviation=True,
    least_count=2,
    depends_on_length=True,
    estimate=True,
    cites=(Cite("jolliffe2002principal", "sec. 6.1.1"),),
)
def centred_energy_rank_99(tokens: Tokens) -> Tensor:
    r"""Fewest directions that hold 99% of the energy after subtracting the mean token.

    **Exact.** Blind to the mean token, and so to token uniformity: collapsed tokens whose differences are noise read as
    high as noise. Undefined when all tokens are equal.
    ``measure`` takes it from 1,024 evenly spaced tokens if both n and d are above 1024.

    Example:
        >>> import torch
        >>> centred_energy_rank_99(torch.tensor([[5.0, 1.0], [5.0, -1.0]])).item()
        1.0
    """
    return _count_to_99(tokens.centred_singular_values)


def _count_to_99(singular_values: Tensor) -> Tensor:
    share = (singular_values / singular_values[:, :1]).square()
    # Summed from the smallest, so that a long tail is not lost to rounding.
    tail = share.flip(-1).cumsum(-1).flip(-1)
    count = (tail > 0.01 * tail[:, :1]).sum(-1).double()
    return torch.where(singular_values[:, 0] > 0, count, math.nan)
