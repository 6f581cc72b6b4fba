"""Number of directions in use, by the second moment of the energy."""

from __future__ import annotations

import math

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, SHIFT, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"\mathrm{PR}(X)",
    range=(1.0, math.inf),
    at_collapse=1.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="gram",
    depends_on_length=True,
    estimate=True,
    cites=(Cite("gao2017theory"),),
)
def participation_ratio(tokens: Tokens) -> Tensor:
    r"""Inverse concentration of energy over directions, :math:`(\sum_i s_i^2)^2 / \sum_i s_i^4`.

    **Exact**, from traces: :math:`\|X\|_F^4 / \|XX^T\|_F^2` needs no singular value. 1 at rank one, rank(X) when all
    are equal. Undefined for X = 0.
    ``measure`` takes it from 1,024 evenly spaced tokens if both n and d are above 1024.

    Example:
        >>> import torch
        >>> participation_ratio(torch.eye(3)).item()
        3.0
    """
    return tokens.energies.row.sum(-1).square() / tokens.gram_energies.plain


@token_metric(
    symbol=r"\mathrm{PR}(CX)",
    range=(1.0, math.inf),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE | SHIFT,
    needs="gram",
    reads_deviation=True,
    least_count=2,
    depends_on_length=True,
    estimate=True,
    cites=(Cite("gao2017theory"),),
)
def centred_participation_ratio(tokens: Tokens) -> Tensor:
    r"""Participation ratio after subtracting the mean token.

    **Exact.** Blind to the mean token, and so to token uniformity: collapsed tokens whose differences are noise read as
    high as noise. Undefined when all tokens are equal.
    ``measure`` takes it from 1,024 evenly spaced tokens if both n and d are above 1024.

    Example:
        >>> import torch
        >>> centred_participation_ratio(torch.tensor([[5.0, 1.0], [5.0, -1.0]])).item()
        1.0
    """
    return tokens.energies.centred_row.sum(-1).square() / tokens.gram_energies.centred
