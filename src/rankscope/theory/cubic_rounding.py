"""How far the leading term of the cubic law, computed in float64, may be from its exact value."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.theory.attention_weights import HeadTensors
from rankscope.theory.cubic_law import common_attention

_EPS = torch.finfo(torch.float64).eps


def rounding_allowance(
    D: Float[Tensor, "*batch tokens dim"],
    heads: HeadTensors,
    log_scale: Float[Tensor, "*batch"],
    base: Float[Tensor, "*batch dim"],
) -> Float[Tensor, "*batch"]:
    r"""Bound on the error of ``leading_term(D, heads, log_scale, base)`` for a unit direction, in Frobenius norm.

    **Bound** to first order in machine epsilon, twice over for what is left out. A product of inner dimension m is
    off by at most m eps times the Frobenius norms of its factors; an error travels on through the computed factors
    that follow.

    Example:
        >>> from rankscope.theory.attention_weights import head_tensors
        >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
        >>> R = torch.tensor([[0.5**0.5], [-(0.5**0.5)]], dtype=torch.float64)
        >>> float(rounding_allowance(R, head_tensors(one, one, one, one), R.new_tensor(-9.0), R.new_zeros(1))) < 1e-13
        True
    """
    n, dim = D.shape[-2:]
    count, d_v, _ = heads.W_O.shape
    d_qk = heads.W_Q.shape[2]
    w_q, w_k, w_v, w_o = (_norm(W) for W in (heads.W_Q, heads.W_K, heads.W_V, heads.W_O))
    rows = D.unsqueeze(-3)
    Q, K, V = rows @ heads.W_Q, rows @ heads.W_K, rows @ heads.W_V
    pi = common_attention(K, heads, log_scale, base)
    largest = pi.amax(-1)
    covariance = K.transpose(-1, -2) @ (pi.unsqueeze(-1) * V) - (pi.unsqueeze(-2) @ K).mT @ (pi.unsqueeze(-2) @ V)
    G = covariance @ heads.W_O
    q, k, v, g = _norm(Q), _norm(K), _norm(V), _norm(G)
    # 16: normalising and centring D; n: the means under pi
    off_q, off_k, off_v = ((dim + n + 16) * _EPS * w for w in (w_q, w_k, w_v))
    in_pi = _EPS * (8 + 2 * (dim + d_qk) * _exponent(heads, log_scale, base, w_q, w_k))
    off_covariance = largest * (off_k * v + k * off_v + (2 * n * _EPS + 2 * in_pi) * k * v)
    off_g = off_covariance * w_o + d_v * _EPS * _norm(covariance) * w_o
    off = off_q * g + q * off_g + (d_qk + count + n) * _EPS * q * g
    return 2 * abs(heads.scale) * off.sum(-1)


def _norm(M: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(M, dim=(-2, -1))
    return norm


def _exponent(heads: HeadTensors, log_scale: Tensor, base: Tensor, w_q: Tensor, w_k: Tensor) -> Tensor:
    """No entry of the tilt is larger, nor any sum of moduli on the way to it."""
    x = torch.linalg.vector_norm(base.detach().to(torch.float64), dim=-1, keepdim=True)
    query = x * w_q + torch.linalg.vector_norm(heads.b_Q, dim=-1)
    largest: Tensor = log_scale.exp().unsqueeze(-1) * abs(heads.scale) * query * w_k
    return largest
