"""What the values of oracles are derived from: the layers, flows and limits of the papers, written out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.ext.theory.oracles.chen_2026_context_length import critical_scale
from rankscope.ext.theory.oracles.derrida_1981_random_energy import critical_score_std

Place = Literal["pre", "post"]


def output_cosine(gamma: float, cosine: float) -> float:
    r"""Cosine of two outputs as n grows: 1, :math:`4\rho/(1+3\rho)`, :math:`\rho` for gamma below, at, above critical.

    **Exact** in that limit, for rho above 0.
    """
    critical = critical_scale(cosine)
    if gamma < critical:
        return 1.0
    return cosine if gamma > critical else 4 * cosine / (1 + 3 * cosine)


def output_cosine_at(gamma: float, cosine: float, tokens: int) -> float:
    """The same for a finite number of equiangular tokens. **Exact**."""
    # each of the others relative to oneself
    ratio = math.exp(-gamma * (1 - cosine) * math.log(tokens))
    own = 1 / (1 + (tokens - 1) * ratio)
    other = ratio * own
    # outputs o_i = own x_i + other (sum of the rest); sums of weights are 1
    norm = own**2 + (tokens - 1) * other**2 + cosine * (1 - own**2 - (tokens - 1) * other**2)
    shared = 2 * own * other + (tokens - 2) * other**2
    return (shared + cosine * (1 - shared)) / norm


def rates(cosine: float, length: float, tokens: int, beta: float, place: Place) -> tuple[float, float]:
    """Time derivatives of the cosine and of the length of a token. **Exact** for equiangular tokens."""
    # divided by e^beta, so that nothing overflows
    other = math.exp(beta * (cosine - 1)) / (1 + (tokens - 1) * math.exp(beta * (cosine - 1)))
    turning = 2 * other * (1 - cosine) * (1 + (tokens - 1) * cosine)
    if place == "post":
        return turning, 0.0
    own = 1 - (tokens - 1) * other
    return turning / length, own + (tokens - 1) * other * cosine


def cosine_at(
    time: float, tokens: int, initial_cosine: float, *, beta: float = 1.0, place: Place = "post", steps: int = 4000
) -> float:
    """Cosine after a time, by Runge and Kutta's fourth-order rule. **Exact** up to its step."""
    rho, length, h = initial_cosine, 1.0, time / steps
    for _ in range(steps):
        k1 = rates(rho, length, tokens, beta, place)
        k2 = rates(rho + h / 2 * k1[0], length + h / 2 * k1[1], tokens, beta, place)
        k3 = rates(rho + h / 2 * k2[0], length + h / 2 * k2[1], tokens, beta, place)
        k4 = rates(rho + h * k3[0], length + h * k3[1], tokens, beta, place)
        rho += h / 6 * (k1[0] + 2 * k2[0] + 2 * k3[0] + k4[0])
        length += h / 6 * (k1[1] + 2 * k2[1] + 2 * k3[1] + k4[1])
    return rho


def filtering(value_eigenvalue: float, attention_eigenvalues: Sequence[float]) -> str:
    r"""Which mode of :math:`I + hA` dominates with depth; that of all ones, the first of A, is 1."""
    smooth, *sharp = (abs(1 + value_eigenvalue * a) for a in attention_eigenvalues)
    return "smooths" if smooth > max(sharp) else "sharpens"


def query_key_gradients(
    X: Float[Tensor, "tokens dim"], W_Q: Tensor, W_K: Tensor, W_V: Tensor, weight: Tensor
) -> tuple[float, float]:
    """Norms of the gradients of W_Q and W_K for the loss <weight, attention(X)>. **Exact**."""
    W_Q, W_K = (matrix.detach().clone().requires_grad_() for matrix in (W_Q, W_K))
    with torch.enable_grad():
        scores = (X @ W_Q) @ (X @ W_K).T / math.sqrt(W_Q.shape[1])
        loss = (weight * (torch.softmax(scores, -1) @ X @ W_V)).sum()
        of_Q, of_K = torch.autograd.grad(loss, (W_Q, W_K))
    return float(torch.linalg.matrix_norm(of_Q)), float(torch.linalg.matrix_norm(of_K))


def limiting_participation(score_std: float, keys: int) -> float:
    r"""Limit of Y as n grows with :math:`\sigma/\sqrt{\log n}` fixed: 0, or :math:`1 - \sigma_c/\sigma`. **Exact**.

    Convergence is slow, in :math:`1/\log n`; :func:`participation` is the value at n.
    """
    critical = critical_score_std(keys)
    return 0.0 if score_std <= critical else 1 - critical / score_std
