"""Differences of means and their percentile intervals, many at once."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CHUNK = 2000
LEAST = 2
"""Minimum number of sequences for an interval."""


@dataclass(frozen=True, eq=False)
class Resampled:
    """One entry per value; the interval is NaN if fewer than two sequences have that value."""

    mean_a: Floats
    mean_b: Floats
    difference: Floats
    low: Floats
    high: Floats
    count_a: NDArray[np.int64]
    count_b: NDArray[np.int64]


def resampled_differences(a: Floats, b: Floats, *, paired: bool, draws: int, level: float, seed: int) -> Resampled:
    r"""Differences :math:`\bar b - \bar a` with percentile bootstrap intervals over the columns.

    **Estimate.** Percentile intervals of few values are too narrow. The interval is widened around the difference by
    :math:`(t/z)\sqrt{n/(n-1)}`, with n the smaller number of sequences, t and z the quantiles of Student's law with
    n - 1 degrees of freedom and of the normal law. This makes it correct for normal values.

    If paired, column i of ``a`` belongs to column i of ``b``; pairs with a NaN on either side are dropped, and whole
    pairs are resampled. If not, each side is resampled independently. All rows share the same draws.

    Args:
        a: shape ``(values, sequences)``, NaN where undefined.
        b: the same number of rows; the same shape if paired.
        paired: whether the columns belong together.
        draws: number of resamples.
        level: level of the interval, e.g. 0.95.
        seed: of the draws.
    """
    if paired:
        missing = np.isnan(a) | np.isnan(b)
        a, b = np.where(missing, np.nan, a), np.where(missing, np.nan, b)
    # A resample is a vector of counts per column, so all resampled means of a chunk are one matrix product.
    # Sharing the counts between both sides resamples whole pairs.
    random = np.random.default_rng(seed)
    weights_a = _weights(random, a.shape[1], draws)
    weights_b = weights_a if paired else _weights(random, b.shape[1], draws)
    tail = (1.0 - level) / 2.0
    low, high = np.full(a.shape[0], np.nan), np.full(a.shape[0], np.nan)
    count_a, count_b = np.isfinite(a).sum(axis=1), np.isfinite(b).sum(axis=1)
    for start in range(0, a.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        spread = _means(b[part], weights_b) - _means(a[part], weights_a)
        enough = (count_a[part] >= LEAST) & (count_b[part] >= LEAST)
        if enough.any():
            low[part][enough], high[part][enough] = np.nanquantile(spread[enough], (tail, 1.0 - tail), axis=1)
    mean_a, mean_b = (_means(side, np.ones((side.shape[1], 1)))[:, 0] for side in (a, b))
    difference = mean_b - mean_a
    wider = widening(np.minimum(count_a, count_b), level)
    low, high = (difference + wider * (end - difference) for end in (low, high))
    return Resampled(mean_a, mean_b, difference, low, high, count_a, count_b)


def widening(counts: NDArray[np.int64], level: float) -> Floats:
    r"""The factor :math:`(t/z)\sqrt{n/(n-1)}` for each number of sequences; 1 if there are too few for an interval.

    The quantile of Student's law is taken from its expansion in 1/(n - 1), **Estimate**: 0.2% off at n = 5.

    Example:
        >>> widening(np.array([8]), 0.95).round(2).tolist()
        [1.29]
    """
    z = NormalDist().inv_cdf(0.5 + level / 2.0)
    degrees = np.maximum(counts - 1, 1).astype(np.float64)
    # Cornish-Fisher expansion: t = z + g1(z) / d + g2(z) / d^2 + ..., with d degrees of freedom.
    terms = (
        (z**3 + z) / 4.0,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96.0,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384.0,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160.0,
    )
    t = z + sum(term / degrees**power for power, term in enumerate(terms, 1))
    return np.where(counts >= LEAST, t / z * np.sqrt((degrees + 1) / degrees), 1.0)


def _weights(random: np.random.Generator, count: int, draws: int) -> Floats:
    """How often each column is drawn, shape ``(columns, draws)``."""
    return random.multinomial(count, np.full(count, 1.0 / count), size=draws).T.astype(np.float64)


def _means(values: Floats, weights: Floats) -> Floats:
    """Weighted means over the known columns, shape ``(values, draws)``; NaN if a draw contains none of them."""
    known = np.isfinite(values)
    total = np.where(known, values, 0.0) @ weights
    count = known.astype(np.float64) @ weights
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
