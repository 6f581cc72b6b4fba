"""Sides other than tokens and attention: example tensors of each, and its metrics straight from their definitions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mpmath import mp, mpf
from torch import Tensor

from tests.reference.metrics import Rows, dot, median


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _routing(seed: int, *batch: int) -> tuple[Tensor, Tensor]:
    probs = (2 * gaussian(seed, *batch, 7, 5)).softmax(-1)
    return probs, probs.topk(2, dim=-1).indices


def _causal(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)


def _branch(seed: int, *batch: int) -> tuple[Tensor, Tensor]:
    """Seven tokens in two of five channels, mixed by signs, so that their rank is exactly two; and any output."""
    read = torch.zeros(*batch, 7, 5, dtype=torch.float64)
    read[..., [0, 3]] = gaussian(seed, *batch, 7, 2)
    read[..., 4] = -read[..., 3]
    return read, gaussian(seed + 1, *batch, 7, 5)


EXAMPLES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "branch": _branch,
    "router": lambda seed, *batch: _routing(seed, *batch),
    "scores": lambda seed, *batch: (_causal(3 * gaussian(seed, *batch, 2, 7, 7)),),
    "queries": lambda seed, *batch: (gaussian(seed, *batch, 2, 7, 5), gaussian(seed + 1, *batch, 2, 7, 5)),
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


def outside_span_share(x: Rows, y: Rows) -> mpf:
    """Gram-Schmidt over the tokens read, in many digits; a remainder of exactly zero adds no direction."""
    basis: list[list[mpf]] = []
    for row in x:
        rest = row
        for b in basis:
            rest = plus(rest, [-dot(row, b) * v for v in b])
        if length(rest) > mpf(10) ** (5 - mp.dps) * length(row):
            basis.append([v / length(rest) for v in rest])
    inside = sum(dot(row, b) ** 2 for row in y for b in basis)
    total = sum(dot(row, row) for row in y)
    return 1 - inside / total if 0 < len(basis) < len(x[0]) and total else mp.nan


def outside_span_above(floor: float, x: Rows, y: Rows) -> mpf:
    """The same, with a span of the directions of X whose singular value is above the floor."""
    _, s, V = mp.svd_r(mp.matrix(x), full_matrices=False)
    basis = [list(V[k, :]) for k in range(len(s)) if s[k] > floor * s[0]]
    inside = sum(dot(row, b) ** 2 for row in y for b in basis)
    total = sum(dot(row, row) for row in y)
    return 1 - inside / total if 0 < len(basis) < len(x[0]) and total else mp.nan


def entropy(p) -> mpf:
    return -sum(v * mp.log(v) for v in p if v > 0)


def load(probs: Rows, chosen: Rows) -> list[mpf]:
    every = [int(e) for row in chosen for e in row]
    return [mpf(every.count(e)) / len(every) for e in range(len(probs[0]))]


REFERENCE: dict[str, Callable[..., mpf]] = {
    "router_entropy": lambda p, c: mean_of_known(entropy([v / sum(r) for v in r]) / mp.log(len(r)) for r in p),
    "effective_experts": lambda p, c: mp.exp(entropy(load(p, c))),
    "largest_expert_share": lambda p, c: max(load(p, c)),
    "outside_span_share": outside_span_share,
    "max_attention_logit": lambda s: max(v for row in s for v in row),
    "query_key_bound": lambda q, k: max(map(length, q)) * max(map(length, k)),
    "write_ratio": write_ratio,
    "block_influence": lambda x, u: 1 - mean_of_known(cosine(a, plus(a, b)) for a, b in zip(x, u, strict=True)),
    "update_alignment": lambda x, u: mean_of_known(cosine(a, b) for a, b in zip(x, u, strict=True)),
}
