"""Sides other than tokens and attention: example tensors of each, and its metrics straight from their definitions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mpmath import mp, mpf
from torch import Tensor

from tests.reference.metrics import Rows, dot, median


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EXAMPLES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "update": lambda seed, *batch: (gaussian(seed, *batch, 7, 5) + 0.5, gaussian(seed + 1, *batch, 7, 5) / 3),
}
"""Tensors of 7 tokens per sequence, from a seed and the batch axes."""


def length(a) -> mpf:
    return mp.sqrt(dot(a, a))


def cosine(a, b) -> mpf | None:
    return dot(a, b) / (length(a) * length(b)) if any(a) and any(b) else None


def plus(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]


def mean_of_known(values) -> mpf:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else mp.nan


def write_ratio(x: Rows, u: Rows) -> mpf:
    ratios = sorted(length(b) / length(a) for a, b in zip(x, u, strict=True) if any(a))
    return median(ratios) if ratios else mp.nan


REFERENCE: dict[str, Callable[..., mpf]] = {
    "write_ratio": write_ratio,
    "block_influence": lambda x, u: 1 - mean_of_known(cosine(a, plus(a, b)) for a, b in zip(x, u, strict=True)),
    "update_alignment": lambda x, u: mean_of_known(cosine(a, b) for a, b in zip(x, u, strict=True)),
}
