"""Softmax attention in as many digits as it takes, straight from the definition, and in float64 on differences.

Nothing is linearised here and nothing is shared with the library: matrices are lists of mpmath numbers.
"""

from __future__ import annotations

import math

import numpy as np
from mpmath import mp, mpf

Matrix = list[list[mpf]]


def matrix(values: np.ndarray) -> Matrix:
    """Floats as exact binary fractions."""
    return [[mpf(float(v)) for v in row] for row in np.atleast_2d(values)]


def times(left: Matrix, right: Matrix) -> Matrix:
    columns = list(zip(*right, strict=True))
    return [[mp.fdot(row, column) for column in columns] for row in left]


def attention(X: Matrix, heads: list[dict[str, np.ndarray]], scale: float) -> Matrix:
    """Sum over heads of softmax(scale (XQ + q)(XK)^T) X V O; the constant biases of values are left out."""
    n, dim = len(X), len(X[0])
    out = [[mpf(0)] * dim for _ in range(n)]
    for head in heads:
        bias = [mpf(float(b)) for b in head["b_Q"]]
        Q = [[q + b for q, b in zip(row, bias, strict=True)] for row in times(X, matrix(head["W_Q"]))]
        K = times(X, matrix(head["W_K"]))
        values = times(times(X, matrix(head["W_V"])), matrix(head["W_O"]))
        for i in range(n):
            weights = [mp.exp(mpf(scale) * mp.fdot(Q[i], K[j])) for j in range(n)]
            total = mp.fsum(weights)
            for c in range(dim):
                out[i][c] += mp.fdot(weights, [row[c] for row in values]) / total
    return out


def residual(X: Matrix) -> Matrix:
    means = [mp.fsum(column) / len(X) for column in zip(*X, strict=True)]
    return [[v - m for v, m in zip(row, means, strict=True)] for row in X]


def log_norm(R: Matrix) -> mpf:
    return mp.log(mp.fsum(v * v for row in R for v in row)) / 2


def tokens(base: np.ndarray, R: np.ndarray, log10_scale: int) -> Matrix:
    """1 base^T + 10^log10_scale R, without rounding to floats."""
    factor = mpf(10) ** log10_scale
    return [[mpf(float(b)) + factor * mpf(float(v)) for b, v in zip(base, row, strict=True)] for row in R]


def float_step(
    x: np.ndarray, R: np.ndarray, log_scale: float, heads: list[dict[str, np.ndarray]], scale: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """The same layer in float64 on differences: rows that all share are dropped before they are computed.

    Returns the mean token, the unit residual and its log-norm.
    """
    small = math.exp(log_scale) if log_scale > -700 else 0.0
    # below this expm1(square E) is square E to the last digit, and further below the quotient would be of subnormals
    square = small * small if log_scale > -30 else 0.0
    acc, common = np.zeros_like(R), np.zeros_like(x)
    for head in heads:
        query = x @ head["W_Q"] + head["b_Q"]
        tilt = small * scale * (R @ head["W_K"] @ query)
        pi = np.exp(tilt - tilt.max())
        pi /= pi.sum()
        E = scale * (R @ head["W_Q"]) @ (R @ head["W_K"]).T
        grown = np.expm1(square * E) / square if square > 0 else E
        mean = (grown * pi).sum(1, keepdims=True)
        P = pi * (grown - mean) / (1 + square * mean)
        W = head["W_V"] @ head["W_O"]
        acc += P @ R @ W
        common += (x + small * (pi @ R)) @ W
    shift = acc.mean(0)
    left = acc - shift
    norm = float(np.linalg.norm(left))
    return common + small**3 * shift, left / norm, 3 * log_scale + math.log(norm)
