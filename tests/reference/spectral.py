"""Powers of attention matrices in many digits, and a masked network run step by step in float64."""

from __future__ import annotations

import math

import numpy as np
from mpmath import mp, mpf


def uniform_over(mask: np.ndarray) -> np.ndarray:
    """P0 of a mask without positions: each row uniform over what it sees."""
    return mask / mask.sum(1, keepdims=True)


def log_norm_of_power(mask: np.ndarray, power: int, digits: int) -> float:
    """log ||C P0^t||_F with exact row weights 1/k, by plain multiplication of mpmath matrices."""
    with mp.workdps(digits):
        n = len(mask)
        P = [[mpf(int(v)) / int(row.sum()) for v in row] for row in mask]
        Y = [[mpf(int(i == j)) for j in range(n)] for i in range(n)]
        for _ in range(power):
            columns = list(zip(*Y, strict=True))
            Y = [[mp.fdot(row, column) for column in columns] for row in P]
        means = [mp.fsum(column) / n for column in zip(*Y, strict=True)]
        return float(mp.log(mp.fsum((v - m) ** 2 for row in Y for v, m in zip(row, means, strict=True))) / 2)


def network_log_residuals(mask: np.ndarray, dim: int, layers: int, seed: int) -> list[float]:
    """Log residuals of softmax attention under a mask with random scores and orthogonal values, layer by layer."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(len(mask), dim))
    x, R, log_scale = X.mean(0), X - X.mean(0), 0.0
    found = []
    for _ in range(layers):
        A = rng.normal(size=(dim, dim)) / dim
        V = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
        full = x + math.exp(log_scale) * R
        scores = np.where(mask, full @ A @ full.T, -np.inf)
        P = np.exp(scores - scores.max(1, keepdims=True))
        P /= P.sum(1, keepdims=True)
        R = P @ R
        shift = R.mean(0)
        x, R = (x + math.exp(log_scale) * shift) @ V, (R - shift) @ V
        norm = np.linalg.norm(R)
        log_scale, R = log_scale + math.log(norm), R / norm
        found.append(log_scale)
    return found
