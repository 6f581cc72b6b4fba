r"""Distances between pairs of tokens, relative to the pair itself.

Sums over all tokens are dominated by the largest ones; a pair has its own scale, so medians and counts over pairs do
not change if a few other tokens are huge. Channels are treated in the same way: a channel whose energy is far above
that of the others is first scaled down (winsorised), because a large constant channel would make every pair look equal.

With unit vectors :math:`v_i` and lengths :math:`l_i` of the scaled tokens, and
:math:`r = \min(l_i, l_j) / \max(l_i, l_j)`,

.. math:: \delta_{ij} = \|x_i - x_j\| / \max(l_i, l_j) = \sqrt{(1 - r)^2 + r\,\|v_i - v_j\|^2}.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankscope.linalg.precision import may_hold

MOST_TOKENS = 128
"""Pairs are formed from at most this many tokens, evenly spaced over those that count."""

NEAR = math.sqrt(2.0) * 0.03
r"""Relative distance up to which two tokens are copies of each other. Tokens with a relative residual of r differ from
each other by :math:`\sqrt2 r`, and a residual of 0.03 counts as collapsed."""

OUTLIER = 100.0
"""A channel with more than this many times the median energy (ten times the amplitude) is an outlier. The largest of
4096 Gaussian channels has 35 times the median, so ordinary channels are not outliers."""


def outlier_energy(energy: Float[Tensor, "sequences dim"]) -> Float[Tensor, "sequences 1"]:
    """The energy above which a channel is an outlier. Zero channels are excluded from the median."""
    return OUTLIER * energy.masked_fill(energy == 0, math.nan).nanmedian(-1, keepdim=True).values


# Median distance below which distances between unit vectors are recomputed relative to a token in the middle.
_CLOSE = 1e-3
# Squares of numbers below this lose digits.
_UNDERFLOWS = 1e-140


@dataclass(frozen=True)
class Pairs:
    """Statistics of the distances between all pairs, one value per sequence; NaN for X = 0 or fewer than two tokens.

    Attributes:
        distance: median relative distance.
        direction: median distance between unit vectors; NaN if fewer than two tokens are not zero.
        largest_cluster: largest share of the tokens that are copies of one token, including itself.
        copied: share of the tokens that have a copy.
        distinct: number of distinct tokens, copies counted once.
    """

    distance: Float[Tensor, " sequences"]
    direction: Float[Tensor, " sequences"]
    largest_cluster: Float[Tensor, " sequences"]
    copied: Float[Tensor, " sequences"]
    distinct: Float[Tensor, " sequences"]


class PairDistances(NamedTuple):
    """Squared distances between the unit vectors of a sample of tokens, their lengths, and which places hold one."""

    apart: Float[Tensor, "sequences size size"]
    length: Float[Tensor, "sequences size"]
    known: Bool[Tensor, "sequences size"] | None


def pair_statistics(apart: Tensor, length: Tensor, known: Tensor | None, V: Tensor | None = None) -> tuple[Tensor, ...]:
    """The fields of :class:`Pairs`, given V if ``apart`` was computed from products."""
    ratio = _ratios(length)
    distance = _relative(apart, ratio)
    middle = _median_of_pairs(distance, known)
    close = middle < _CLOSE
    if V is not None and bool(close.any()):
        # |v_i - v_j|^2 = 2 - 2 v_i.v_j cancels for close tokens. Relative to a token in the middle it does not.
        # Of all sequences, because a product of a single matrix rounds differently.
        W = V - _medoid(distance, known, V)
        apart = torch.where(close[:, None, None], squared_distances(W, W.square().sum(-1)), apart)
        distance = _relative(apart, ratio)
        middle = _median_of_pairs(distance, known)
    directed = length > 0
    some = (directed if known is None else directed & known) if may_hold(~directed) else known
    return middle, _median_of_pairs(apart, some).sqrt_(), *_clusters(distance <= NEAR, known)


# Bound on the relative error of squared medians from products with the mean-subtracted tokens. Those from unit vectors
# have one of 1e-9 at the distance below which they are recomputed.
_SURE = 1e-9


def centred_pair_statistics(
    products: Float[Tensor, "sequences size size"],
    energy: Float[Tensor, "sequences size"],
    rounded: Float[Tensor, "sequences size"],
    known: Bool[Tensor, "sequences size"] | None,
) -> tuple[tuple[Tensor, ...], Bool[Tensor, " sequences"]]:
    r"""The fields of :class:`Pairs` from products of the mean-subtracted tokens, which a spectrum has computed anyway.

    Distances do not depend on the mean, so nothing cancels if all tokens are close. Something does if a few are far
    away and take the mean with them. The second result says for which sequences that is negligible:
    :math:`\|x_i - x_j\|^2` has an error of a few roundings of :math:`c_{ii} + c_{jj}`, or of what was rounded before.

    Args:
        products: :math:`c_{ij}`, zero for places that hold no token.
        energy: squared lengths of the tokens themselves.
        rounded: the diagonal of the products before anything was subtracted.
        known: which places hold a token; None if all do.
    """
    diagonal = products.diagonal(dim1=-2, dim2=-1).contiguous()
    # Few fresh buffers: on a CPU the pages of a new one cost more than the arithmetic in it.
    square = (diagonal.unsqueeze(-1) + diagonal.unsqueeze(-2)).add_(products, alpha=-2.0).clamp_(min=0.0)
    square.diagonal(dim1=-2, dim2=-1).zero_()
    length = energy.sqrt()
    first, second = length.unsqueeze(-1), length.unsqueeze(-2)
    longer = torch.maximum(energy.unsqueeze(-1), energy.unsqueeze(-2))
    distance = torch.div(square, longer, out=longer)
    # |v_i - v_j|^2 l_i l_j = |x_i - x_j|^2 - (l_i - l_j)^2.
    gap = (first - second).square_()
    direction = square.sub_(gap).clamp_(min=0.0).div_(torch.mul(first, second, out=gap))
    middle, middle_direction = (_median_of_pairs(squares, known) for squares in (distance, direction))
    relative = rounded / energy
    worst = (relative if known is None else relative.masked_fill(~known, 0.0)).amax(-1)
    rounding = 4.0 * torch.finfo(products.dtype).eps * worst
    sure = rounding <= _SURE * torch.minimum(middle, middle_direction)
    return (middle.sqrt_(), middle_direction.sqrt_(), *_clusters(distance <= NEAR**2, known)), sure


def without_outliers(X: Tensor, *, wide: bool) -> tuple[Tensor, Tensor]:
    """Unit vectors and lengths after scaling down outlier channels; all tokens have equal weight in finding them."""
    V, length = normalised(X, wide=wide)
    energy = torch.linalg.vector_norm(V, dim=-2).square_()
    weight = (outlier_energy(energy) / energy).sqrt_().clamp_(max=1.0).nan_to_num_(nan=1.0)
    if may_hold(weight < 1.0):
        V, rest = normalised(V * weight.unsqueeze(-2), wide=wide)
        length = length * rest
    return V, length


def normalised(X: Tensor, *, wide: bool = True) -> tuple[Tensor, Tensor]:
    """Unit vectors, written over X if no length underflows, and lengths; a zero token stays zero.

    Squares of numbers from a narrow format, if not ``wide``, do not underflow.
    """
    length = torch.linalg.vector_norm(X, dim=-1)
    if wide and may_hold(small := length < _UNDERFLOWS):
        peak = X.abs().amax(-1).masked_fill(~small, 1.0)
        peak.masked_fill_(peak == 0, 1.0)
        # Divide: the reciprocal of the smallest numbers would overflow.
        X = X / peak.unsqueeze(-1)
        rest = torch.linalg.vector_norm(X, dim=-1)
        return X.div_(rest.clamp_min(torch.finfo(rest.dtype).tiny).unsqueeze(-1)), rest * peak
    return X.div_(length.clamp_min(torch.finfo(length.dtype).tiny).unsqueeze(-1)), length


def squared_distances(V: Tensor, square: Tensor) -> Tensor:
    """Squared distances between the rows of V, of which ``square`` are the squared lengths, from their products."""
    apart = torch.baddbmm(square.unsqueeze(-1) + square.unsqueeze(-2), V, V.mT, alpha=-2.0).clamp_(min=0.0)
    apart.diagonal(dim1=-2, dim2=-1).zero_()
    return apart


def _ratios(length: Tensor) -> Tensor:
    """The ratio of the shorter to the longer length of each pair; 1 for two zero tokens, which are equal."""
    shorter = torch.minimum(length.unsqueeze(-1), length.unsqueeze(-2))
    longer = torch.maximum(length.unsqueeze(-1), length.unsqueeze(-2))
    return torch.where(longer > 0, shorter / longer, 1.0)


def _relative(apart: Tensor, ratio: Tensor) -> Tensor:
    return torch.addcmul((1.0 - ratio).square_(), ratio, apart).sqrt_()


def _median_of_pairs(values: Tensor, some: Tensor | None) -> Tensor:
    """Median above the diagonal, over pairs of which both places are among ``some``; None stands for all."""
    size = values.shape[-1]
    row, column = torch.triu_indices(size, size, 1, device=values.device).unbind()
    place = row * size + column
    # Three times as fast as selecting by two indices.
    upper = values.flatten(1).gather(1, place.expand(len(values), -1))
    if upper.shape[-1] == 0:
        return upper.sum(-1) * math.nan
    if some is None:
        return _median(upper)
    both = (some.unsqueeze(-1) & some.unsqueeze(-2)).flatten(1).index_select(1, place)
    return upper.masked_fill(~both, math.nan).nanmedian(-1).values


def _median(rows: Tensor) -> Tensor:
    """Median of each row, the lower of two; NaN if the row has one."""
    if rows.device.type != "cpu":
        return rows.median(-1).values
    # Five times as fast on a CPU as torch's, which finds the place of the median too.
    middle = (rows.shape[-1] - 1) // 2
    parted = torch.from_numpy(np.partition(rows.numpy(), middle, axis=-1))
    return torch.where(rows.isnan().any(-1), math.nan, parted[:, middle])


def _medoid(distance: Tensor, known: Tensor | None, V: Tensor) -> Tensor:
    """The unit vector of the token with the smallest median distance to the others."""
    if known is None:
        middle = distance.median(-1).values
    else:
        middle = distance.masked_fill(~known.unsqueeze(-2), math.nan).nanmedian(-1).values.masked_fill(~known, math.inf)
    best: Int[Tensor, " sequences"] = middle.argmin(-1)
    return V[torch.arange(len(best), device=V.device), best].unsqueeze(-2)


def _clusters(near: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if known is not None:
        near = near & known.unsqueeze(-1) & known.unsqueeze(-2)
    members = near.sum(-1).double()
    count = members.new_full(members.shape[:1], float(members.shape[1])) if known is None else known.sum(-1).double()
    # A cluster of s tokens adds s times 1/s. The result depends neither on token order nor on chains of near tokens.
    distinct = torch.where(members > 0, 1.0 / members, 0.0).sum(-1)
    return members.amax(-1) / count, (members > 1).sum(-1) / count, distinct
