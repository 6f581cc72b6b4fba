"""Every attention metric straight from its definition: row by row, and without a mask in many digits."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from mpmath import mp, mpf

from tests.reference.metrics import Rows, centre, frobenius, singular_values
from tests.reference.sides import entropy as entropy_of_row


def entropy(P: np.ndarray, support: np.ndarray, keep: np.ndarray) -> float:
    found = []
    for row, sees, kept in zip(P, support, keep, strict=True):
        k = int(sees.sum())
        if kept and k >= 2 and row.sum() > 0:
            p = row / row.sum()
            found.append(-sum(v * math.log(v) for v in p if v > 0) / math.log(k))
    return sum(found) / len(found) if found else math.nan


def sink_rate(P: np.ndarray, support: np.ndarray, keep: np.ndarray) -> float:
    first = int(np.flatnonzero(support.any(0))[0])
    found = [
        row[first] for row, sees, kept in zip(P, support, keep, strict=True) if kept and sees[first] and sees.sum() > 1
    ]
    return float(sum(found) / len(found)) if found else math.nan


def contraction(P: np.ndarray, support: np.ndarray, keep: np.ndarray) -> float:
    rows = P[keep]
    C = np.eye(len(rows)) - np.ones((len(rows), len(rows))) / len(rows)
    return float(np.linalg.svd(C @ rows, compute_uv=False)[0])


def rank_one_distance(P: np.ndarray, support: np.ndarray, keep: np.ndarray) -> float:
    rows = P[keep]
    return float(np.linalg.norm(rows - rows.mean(0)) / np.linalg.norm(rows))


def diagonal_mass(P: np.ndarray, support: np.ndarray, keep: np.ndarray) -> float:
    if P.shape[0] != P.shape[1]:
        return math.nan
    found = [P[i, i] for i in range(len(P)) if keep[i] and support[i, i] and support[i].sum() > 1]
    return float(sum(found) / len(found)) if found else math.nan


REFERENCE = {
    "diagonal_mass": diagonal_mass,
    "attention_entropy": entropy,
    "first_token_sink_rate": sink_rate,
    "attention_contraction": contraction,
    "attention_rank_one_distance": rank_one_distance,
}


EXACT: dict[str, Callable[[Rows], mpf]] = {
    "diagonal_mass": lambda p: sum(p[i][i] for i in range(len(p))) / len(p),
    "attention_entropy": lambda p: (
        sum(entropy_of_row([v / sum(r) for v in r]) for r in p) / (len(p) * mp.log(len(p[0])))
    ),
    "first_token_sink_rate": lambda p: sum(row[0] for row in p) / len(p),
    "attention_contraction": lambda p: singular_values(centre(p))[0],
    "attention_rank_one_distance": lambda p: frobenius(centre(p)) / frobenius(p),
}
