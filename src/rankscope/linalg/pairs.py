r"""Distances between pairs of tokens, each relative to the pair itself.

Sums over all tokens speak of the largest ones. A pair has its own scale, so that medians and counts over pairs are the
same whether or not a few other tokens are huge. The same is done for channels: one whose energy is far beyond that of
the others is scaled down first (winsorised), because a large constant channel would make every pair look equal.

With unit vectors :math:`v_i` and lengths :math:`l_i` of the tokens after that, and
:math:`r = \min(l_i, l_j) / \max(l_i, l_j)`,

.. math:: \delta_{ij} = \|x_i - x_j\| / \max(l_i, l_j) = \sqrt{(1 - r)^2 + r\,\|v_i - v_j\|^2}.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rankscope.linalg.channels import outlier_energy
from rankscope.linalg.precision import is_wide

if TYPE_CHECKING:
    from rankscope.linalg.tokens import Tokens

MOST_TOKENS = 128
"""Pairs are taken of at most so many tokens, evenly spaced over those that count: all of them up to this length."""

NEAR = math.sqrt(2.0) * 0.03
r"""Relative distance up to which two tokens are copies of each other. Tokens that differ from their mean by a relative
residual of r differ from each other by :math:`\sqrt2 r`, and 0.03 is where a residual counts as collapsed."""

_CLOSE = 1e-3
# Squares of numbers below this lose digits.
_UNDERFLOWS = 1e-140
# A few sequences at a time, so that a float64 copy of their tokens stays in cache.
_GROUP_ENTRIES = 1 << 17


@dataclass(frozen=True)
class Pairs:
    """What the distances of all pairs come to, one value per sequence; NaN for X = 0 and with fewer than two tokens.

    Attributes:
        distance: median relative distance.
        direction: median distance between unit vectors; NaN if fewer than two tokens are not zero.
        largest_cluster: largest share of the tokens that are copies of one of them, itself included.
        copied: share of the tokens that have a copy.
        distinct: number of distinct tokens, copies counted once.
    """

    distance: Float[Tensor, " sequences"]
    direction: Float[Tensor, " sequences"]
    largest_cluster: Float[Tensor, " sequences"]
    copied: Float[Tensor, " sequences"]
    distinct: Float[Tensor, " sequences"]


def pairs(tokens: Tokens) -> Pairs:
    """Take the distances of all pairs, a few sequences at a time."""
    size = min(tokens.tokens, MOST_TOKENS)
    if size == 0:
        return Pairs(*(tokens.zeros() * math.nan for _ in range(5)))
    step = max(1, _GROUP_ENTRIES // (size * max(size, tokens.dim)))
    parts = [_of_group(tokens, slice(start, min(start + step, tokens.sequences)), size)
             for start in range(0, tokens.sequences, step)]  # fmt: skip
    if not parts:
        return Pairs(*(tokens.zeros() for _ in range(5)))
    # X = 0 has no relative distances; NaN has, to a comparison, no copies.
    lost = ~((tokens.energies.row.sum(-1) > 0) & tokens.finite)
    if is_wide(tokens.dtype):
        # Beside a token 2^1022 times its size another is zero in every unit, and its distances are lost.
        lost |= (tokens.linear_sums.row > 0).sum(-1) != tokens.directed
    return Pairs(*(torch.cat(column).masked_fill_(lost, math.nan) for column in zip(*parts, strict=True)))


def _of_group(tokens: Tokens, group: slice, size: int) -> tuple[Tensor, ...]:
    X, known = tokens.sample(group, size)
    V, length = _without_outliers(X)
    upper = torch.triu_indices(size, size, 1, device=X.device).unbind()
    missing = None if known is None else ~(known[:, upper[0]] & known[:, upper[1]])
    ratio = _ratios(length)
    apart = _squared_distances(V, (length > 0).to(length.dtype))
    distance = _relative(apart, ratio)
    middle = _median(distance[:, upper[0], upper[1]], missing)
    close = middle < _CLOSE
    if bool(close.any()):
        # Far below 1 the distances would drown in the rounding of unit vectors: take them from a token in the middle.
        W = V[close] - _medoid(distance[close], None if known is None else known[close], V[close])
        apart[close] = _squared_distances(W, W.square().sum(-1))
        distance = _relative(apart, ratio)
        middle = _median(distance[:, upper[0], upper[1]], missing)
    has_direction = length > 0
    undirected = ~(has_direction[:, upper[0]] & has_direction[:, upper[1]])
    undirected = undirected if missing is None else undirected | missing
    near = distance <= NEAR
    if known is not None:
        near &= known.unsqueeze(-1) & known.unsqueeze(-2)
    return (
        middle,
        _median(apart[:, upper[0], upper[1]].sqrt_(), undirected if bool(undirected.any()) else None),
        *_clusters(near, known),
    )


def _without_outliers(X: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors and lengths after outlier channels are scaled down. Every token has the same say in what is one."""
    V, length = _normalised(X)
    energy = torch.linalg.vector_norm(V, dim=-2).square_()
    weight = (outlier_energy(energy) / energy).sqrt_().clamp_(max=1.0).nan_to_num_(nan=1.0)
    if bool((weight < 1.0).any()):
        V, rest = _normalised(V * weight.unsqueeze(-2))
        length = length * rest
    return V, length


def _normalised(X: Tensor) -> tuple[Tensor, Tensor]:
    length = torch.linalg.vector_norm(X, dim=-1)
    small = length < _UNDERFLOWS
    if bool(small.any()):
        peak = X.abs().amax(-1).masked_fill(~small, 1.0)
        peak.masked_fill_(peak == 0, 1.0)
        # A reciprocal of the smallest numbers would overflow: divide.
        X = X / peak.unsqueeze(-1)
        rest = torch.linalg.vector_norm(X, dim=-1)
        return X.div_(rest.masked_fill(rest == 0, 1.0).unsqueeze(-1)), rest * peak
    return X.div_(length.masked_fill(length == 0, 1.0).unsqueeze(-1)), length


def _squared_distances(V: Tensor, square: Tensor) -> Tensor:
    apart = torch.baddbmm(square.unsqueeze(-1) + square.unsqueeze(-2), V, V.mT, alpha=-2.0).clamp_(min=0.0)
    apart.diagonal(dim1=-2, dim2=-1).zero_()
    return apart


def _ratios(length: Tensor) -> Tensor:
    """The ratio of the shorter to the longer of each pair; 1 for two zero tokens, which are equal."""
    shorter = torch.minimum(length.unsqueeze(-1), length.unsqueeze(-2))
    longer = torch.maximum(length.unsqueeze(-1), length.unsqueeze(-2))
    return torch.where(longer > 0, shorter / longer, 1.0)


def _relative(apart: Tensor, ratio: Tensor) -> Tensor:
    return torch.addcmul((1.0 - ratio).square_(), ratio, apart).sqrt_()


def _median(values: Tensor, missing: Tensor | None) -> Tensor:
    if values.shape[-1] == 0:
        return values.sum(-1) * math.nan
    if missing is None:
        return values.median(-1).values
    return values.masked_fill(missing, math.nan).nanmedian(-1).values


def _medoid(distance: Tensor, known: Tensor | None, V: Tensor) -> Tensor:
    """The unit vector of the token from which the others are least far, by the median."""
    if known is None:
        middle = distance.median(-1).values
    else:
        middle = distance.masked_fill(~known.unsqueeze(-2), math.nan).nanmedian(-1).values.masked_fill(~known, math.inf)
    best: Int[Tensor, " close"] = middle.argmin(-1)
    return V[torch.arange(len(best), device=V.device), best].unsqueeze(-2)


def _clusters(near: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    members = near.sum(-1).double()
    count = members.new_full(members.shape[:1], float(members.shape[1])) if known is None else known.sum(-1).double()
    # A cluster of s tokens adds s times 1/s: neither the order of the tokens nor a chain of near ones decides.
    distinct = torch.where(members > 0, 1.0 / members, 0.0).sum(-1)
    return members.amax(-1) / count, (members > 1).sum(-1) / count, distinct
