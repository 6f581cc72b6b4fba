"""Recursions of the literature as they were published, with which the mean field is compared."""

from __future__ import annotations

import math


def mean_cosine(
    blocks: int, tokens: int, attention_square: float, mlp_square: float, initial_cosine: float = 0.0
) -> float:
    r"""Noci et al. 2022: mean cosine in a residual network with uniform attention and linear MLPs, without norms.

    With :math:`C = \sum_{k,k'}\langle x_k, x_{k'}\rangle`, :math:`N = \sum_k|x_k|^2` and branches scaled by
    :math:`\alpha_1, \alpha_2`: :math:`C_L = [(1+\alpha_1^2)(1+\alpha_2^2)]^LC_0`,
    :math:`N_L = (1+\alpha_2^2)^L[N_0 + (C_0/n)((1+\alpha_1^2)^L - 1)]`, :math:`\rho_L = (C_L - N_L)/((n-1)N_L)`.
    """
    C_0 = tokens * (1 + (tokens - 1) * initial_cosine)
    # both sums divided by (1 + mlp_square)^L, which they share
    C = (1 + attention_square) ** blocks * C_0
    N = tokens + (C - C_0) / tokens
    return (C - N) / ((tokens - 1) * N)


def critical_beta(cosine: float) -> float:
    r"""Giorlandino and Goldt 2026: the inverse temperature :math:`\sqrt{2/(1-\rho)}` at which attention freezes."""
    return math.sqrt(2 / (1 - cosine))


def next_cosine(
    cosine: float, beta: float, value: float, weight: float, out_weight: float, bias: float = 0.0, skip: float = 1.0
) -> float:
    r"""Giorlandino and Goldt 2026: cosine after one post-norm block with a ReLU MLP, many tokens, large width.

    Scores have standard deviation :math:`\beta\sqrt{\log T}`; ``weight`` and ``out_weight`` are the variances of the
    MLP's matrices times their inputs, one in the paper, and both skips have the same strength.
    """
    beta_c = critical_beta(cosine)
    kept = cosine if beta <= beta_c else cosine + (1 - cosine) * (1 - beta_c / beta)
    after = (value * cosine + bias + skip**2 * cosine) / (value * kept + bias + skip**2)
    q1, p1 = weight + bias, weight * after + bias
    c = min(p1 / q1, 1.0)
    relu = (math.sqrt(1 - c * c) + c * (math.pi - math.acos(c))) / math.pi
    q2, p2 = out_weight * q1 / 2 + bias, out_weight * q1 / 2 * relu + bias
    return (p2 + skip**2 * after) / (q2 + skip**2)
