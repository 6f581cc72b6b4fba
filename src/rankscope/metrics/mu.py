"""Distance from consensus, under the names used in the mask and LayerNorm theorems: aliases of the two residuals."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import metric_alias
from rankscope.metrics.residual import relative_residual, residual


@metric_alias(residual, symbol=r"\mu(X)", cites=(Cite("wu2024role"),))
def mu(tokens: Tokens | Tensor) -> Tensor:
    r"""Frobenius norm of the centred tokens, :math:`\mu(X) = \|X - 11^TX/n\|_F`.

    **Exact.** From 0 (all tokens equal) up. The same number as ``residual``; this is the name in the theorems on masks
    and LayerNorm. Not scale-free: without LayerNorm it can fall only because X shrinks. Undefined for fewer than two
    tokens.

    Example:
        >>> import torch
        >>> mu(torch.tensor([[1.0, 6.0], [-1.0, 4.0]])).item()
        2.0
    """
    return residual(tokens)


@metric_alias(relative_residual, symbol=r"\mu(X)/\|X\|_F", cites=(Cite("wu2024role"),))
def mu_over_norm(tokens: Tokens | Tensor) -> Tensor:
    r"""The norm of the centred tokens relative to that of the tokens, :math:`\mu(X)/\|X\|_F`.

    **Exact.** 0 when all tokens are equal, 1 when their mean is zero. The same number as ``relative_residual``.
    Undefined for fewer than two tokens and for X = 0.

    Example:
        >>> import torch
        >>> round(mu_over_norm(torch.tensor([[7.0], [1.0]])).item(), 12)
        0.6
    """
    return relative_residual(tokens)
