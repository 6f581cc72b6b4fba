r"""The linear law of heads that attend differently: :math:`R \to C\sum_h P_hRW_h` at the collapsed point. Ours.

With one attention matrix for all heads the eigenvalues factor (``spectral_law``). With different ones (relative
biases, ALiBi slopes, rotary) they do not, and the map on n x d matrices is iterated without being formed.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope._errors import InputError
from rankscope.theory.stability import LinearMap, StabilityFactor, largest_gain, stability_factor


def heads_map(
    P: Float[Tensor, "heads tokens tokens"], W_V: Float[Tensor, "heads dim d_v"], W_O: Float[Tensor, "heads d_v dim"]
) -> tuple[LinearMap, LinearMap]:
    r"""The map :math:`R \to \sum_h P_hRW_{V,h}W_{O,h}` and its transpose, on float64 (tokens, dim) matrices.

    Raises:
        InputError: shapes that do not fit.

    Example:
        >>> apply, transpose = heads_map(torch.eye(2).unsqueeze(0), torch.ones(1, 1, 1), 3 * torch.ones(1, 1, 1))
        >>> apply(torch.tensor([[1.0], [2.0]], dtype=torch.float64)).tolist()
        [[3.0], [6.0]]
    """
    p, v, o = tuple(P.shape), tuple(W_V.shape), tuple(W_O.shape)
    if len(p) != 3 or p[1] != p[2] or len(v) != 3 or p[0] != v[0] or o != (v[0], v[2], v[1]):
        raise InputError(
            f"P, W_V, W_O have the shapes {p}, {v}, {o}. Expected (heads, tokens, tokens), (heads, dim, d_v) and "
            "(heads, d_v, dim)."
        )
    P, W_V, W_O = (tensor.detach().to(torch.float64) for tensor in (P, W_V, W_O))

    def apply(R: Tensor) -> Tensor:
        return (P @ (R @ W_V) @ W_O).sum(0)

    def transpose(R: Tensor) -> Tensor:
        return (P.mT @ (R @ W_O.mT) @ W_V.mT).sum(0)

    return apply, transpose


def heads_factor(
    P: Float[Tensor, "heads tokens tokens"],
    W_V: Float[Tensor, "heads dim d_v"],
    W_O: Float[Tensor, "heads d_v dim"],
    skip_gain: float = 0.0,
) -> StabilityFactor:
    r"""Spectral radius of :math:`R \to gR + C\sum_h P_hRW_h`: the late factor per layer. **Estimate** with its error.

    Args:
        P: attention of each head at the collapsed point.
        W_V: values.
        W_O: outputs.
        skip_gain: g, what the skip connection adds of R.

    Example:
        >>> causal = torch.ones(6, 6).tril().double()
        >>> eye = torch.eye(2).unsqueeze(0)
        >>> round(heads_factor((causal / causal.sum(-1, keepdim=True)).unsqueeze(0), eye, eye).factor, 9)
        0.5
    """
    apply, _ = heads_map(P, W_V, W_O)
    return stability_factor(lambda R: skip_gain * R + apply(R), P.shape[-1], W_V.shape[1])


def heads_gain(
    P: Float[Tensor, "heads tokens tokens"],
    W_V: Float[Tensor, "heads dim d_v"],
    W_O: Float[Tensor, "heads d_v dim"],
    skip_gain: float = 0.0,
) -> StabilityFactor:
    r"""Largest singular value of :math:`R \to gR + C\sum_h P_hRW_h`: the most one layer can multiply by. **Estimate**.

    Example:
        >>> eye = torch.eye(2).unsqueeze(0)
        >>> round(heads_gain(torch.eye(3).unsqueeze(0), eye, 2 * eye, skip_gain=1.0).factor, 9)
        3.0
    """
    apply, transpose = heads_map(P, W_V, W_O)
    return largest_gain(
        lambda R: skip_gain * R + apply(R), lambda R: skip_gain * R + transpose(R), P.shape[-1], W_V.shape[1]
    )
