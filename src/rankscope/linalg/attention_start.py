"""Where the walks over an attention matrix begin: a row near its mean row, and directions near its top ones.

Both are taken of a few rows, each standing for those around it. Half of them lie evenly over the sequence, half are
denser towards its beginning, where rows of a causal mask are short, large and unlike each other. How well the rows are
chosen costs steps, or width of an interval, never truth.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rankscope.linalg.score_tiles import HeadScores

BLOCK = 6
"""Directions taken through one walk: a product with so few costs less than the exponentials."""

_ROWS_FOR_MEAN = 32
_ROWS_FOR_DIRECTIONS = 256
_SEED = 0
_NEAR_EQUAL = 0.3
"""Relative deviation of the rows above which sums of squares lose no digit that matters without a reference row."""


def attention_start(
    logs: HeadScores, *, directions: bool
) -> tuple[Float[Tensor, " keys"], Float[Tensor, "keys block"]]:
    """A reference row, and orthonormal directions; none where they are not wanted.

    The directions are the top right singular vectors of the sampled rows, centred, and one drawn at random, so that
    no singular vector is orthogonal to all of them.

    Args:
        logs: logarithms of probabilities.
        directions: whether to choose directions.
    """
    if logs.rows == 0:
        zero = torch.zeros(logs.keys, dtype=torch.float64, device=logs.query.device)
        return zero, zero.new_zeros(logs.keys, 0)
    places, weights = _some_places(logs.rows, _ROWS_FOR_DIRECTIONS if directions else _ROWS_FOR_MEAN, logs.query.device)
    P = _some_rows(logs, places)
    mean = ((weights / weights.sum()).to(P) @ P).double()
    energy = _weighted_squares(P, weights)
    D = P.sub_(mean.to(P))
    is_near_equal = _weighted_squares(D, weights) <= _NEAR_EQUAL**2 * energy
    reference = mean if is_near_equal else torch.zeros_like(mean)
    if not directions:
        return reference, reference.new_zeros(logs.keys, 0)
    return reference, _directions(D.mul_(weights.sqrt().to(D).unsqueeze(-1)), min(BLOCK, logs.keys))


def _weighted_squares(rows: Float[Tensor, "some keys"], weights: Float[Tensor, " some"]) -> float:
    return float(weights @ torch.linalg.vector_norm(rows, dim=-1).double().square())


def _some_places(rows: int, most: int, device: torch.device) -> tuple[Int[Tensor, " some"], Float[Tensor, " some"]]:
    """Some of the rows, and how many each stands for."""
    if rows <= most:
        return torch.arange(rows, device=device), torch.ones(rows, dtype=torch.float64, device=device)
    even = torch.linspace(0, rows - 1, most // 2, dtype=torch.float64)
    dense = torch.logspace(0, math.log10(rows), most - most // 2, dtype=torch.float64) - 1
    spread = torch.cat([even, dense]).round().long().clamp(0, rows - 1)
    places = torch.tensor(sorted(set(spread.tolist())))
    between = (places[1:] + places[:-1]).double() / 2
    ends = torch.cat([between.new_tensor([-0.5]), between, between.new_tensor([rows - 0.5])])
    return places.to(device), ends.diff().to(device)


def _some_rows(logs: HeadScores, places: Int[Tensor, " some"]) -> Float[Tensor, "some keys"]:
    sample = logs.pick(places)
    strip = sample.strip(slice(0, places.numel()))
    P = logs.query.new_zeros(places.numel(), logs.tiles * logs.width)
    for tile in range(strip.tiles):
        L = P.new_empty(strip.height, logs.width)
        sample.put_log(L, strip, tile)
        torch.exp(L, out=P[:, tile * logs.width : (tile + 1) * logs.width])
    mass = P.sum(-1, keepdim=True)
    return P.div_(mass.masked_fill_(mass < 0.5, 1.0))[:, : logs.keys]


def _directions(D: Float[Tensor, "some keys"], count: int) -> Float[Tensor, "keys block"]:
    found = D.new_zeros(D.shape[1], 0, dtype=torch.float64)
    gram = (D @ D.T).double()
    if bool(gram.isfinite().all()):
        vectors = torch.linalg.eigh(gram).eigenvectors[:, -(count - 1) :] if count > 1 else gram[:, :0]
        images = (D.T @ vectors.to(D)).double()
        lengths = torch.linalg.vector_norm(images, dim=0)
        found = (images / lengths)[:, lengths > 0]
    generator = torch.Generator().manual_seed(_SEED)
    chance = torch.randn(D.shape[1], count - found.shape[1], dtype=torch.float64, generator=generator)
    orthonormal: Tensor = torch.linalg.qr(torch.cat([found, chance.to(D.device)], 1)).Q
    return orthonormal
