"""How steeply the spectrum of the differences decays."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, SHIFT, TOKEN_ORDER, token_metric

LEAST_RATIO = 1e-4
"""Singular values below this fraction of the largest are left out of the fit: float32 input does not determine them."""


@token_metric(
    symbol=r"\alpha(CX)",
    range=(0.0, math.inf),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE | SHIFT,
    needs="spectrum",
    reads_deviation=True,
    least_count=3,
    depends_on_length=True,
    cites=(Cite("agrawal2022alphareq"),),
)
def alpha_req(tokens: Tokens) -> Tensor:
    r"""Power-law exponent of the centred spectrum: minus the slope of :math:`\log s_j^2` against :math:`\log j`.

    **Exact** least squares over all j with :math:`s_j \ge 10^{-4} s_1`, each with weight 1/j, so that every octave
    of the spectrum counts the same; the paper fits a range chosen by hand. 0 for a flat spectrum, larger when few
    directions carry the differences. Undefined with fewer than two such values. A fit always has a slope, also where
    the spectrum is no power law.

    Example:
        >>> import torch
        >>> basis = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        >>> round(alpha_req(basis * torch.tensor([4.0, 1.0])).item(), 12)  # variances 16 and 1
        4.0
    """
    s = tokens.centred_singular_values
    used = (s >= LEAST_RATIO * s[:, :1]) & (s > 0)
    log_rank = torch.arange(1, s.shape[-1] + 1, dtype=s.dtype, device=s.device).log()
    weight = torch.where(used, torch.exp(-log_rank), 0.0)
    weight = weight / weight.sum(-1, keepdim=True)
    log_variance = torch.where(used, 2.0 * (s / s[:, :1]).log(), 0.0)
    x = log_rank - (weight * log_rank).sum(-1, keepdim=True)
    slope = (weight * x * log_variance).sum(-1) / (weight * x.square()).sum(-1)
    # Sorted values cannot rise; a flat spectrum may by rounding.
    return (-slope).clamp_min(0.0).masked_fill(used.sum(-1) < 2, math.nan)
