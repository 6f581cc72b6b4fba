"""Spectral norms and bilinear constants of heads, from their factors: no dim x dim matrix is formed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.theory.attention_weights import HeadTensors


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """Per head: ``score`` is the spectral norm of scale * W_Q W_K^T, ``value`` that of W_V W_O."""

    score: Float[Tensor, " heads"]
    value: Float[Tensor, " heads"]


def head_norms(heads: HeadTensors) -> HeadNorms:
    """Spectral norms per head. Exact.

    Example:
        >>> from rankscope.theory.attention_weights import head_tensors
        >>> eye = torch.eye(2, dtype=torch.float64).unsqueeze(0)
        >>> norms = head_norms(head_tensors(2 * eye, 3 * eye, eye, 5 * eye, scale=0.5))
        >>> round(norms.score.item(), 12), round(norms.value.item(), 12)
        (3.0, 5.0)
    """
    score = abs(heads.scale) * product_norm(heads.W_Q, heads.W_K)
    return HeadNorms(score, product_norm(heads.W_V, heads.W_O.transpose(-1, -2)))


def product_norm(left: Float[Tensor, "heads dim width"], right: Float[Tensor, "heads dim width"]) -> Tensor:
    """Spectral norm of left right^T, through the triangular factors of both."""
    product = torch.linalg.qr(left).R @ torch.linalg.qr(right).R.transpose(-1, -2)
    norms: Tensor = torch.linalg.matrix_norm(product, 2)
    return norms


def query_norms(heads: HeadTensors, base: Float[Tensor, " dim"]) -> Float[Tensor, " heads"]:
    r"""Per head :math:`\|s W_K (x W_Q + b_Q)^T\|`: by how much the query at x tilts attention, per unit of R."""
    query = (base.to(torch.float64) @ heads.W_Q) + heads.b_Q
    norms: Tensor = torch.linalg.vector_norm((heads.W_K @ query.unsqueeze(-1)).squeeze(-1), dim=-1)
    return abs(heads.scale) * norms
