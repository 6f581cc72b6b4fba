"""Differences of means with Student's intervals, many at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Differences:
    """One entry per row; the interval is NaN if fewer than two sequences have a value."""

    mean_a: Floats
    mean_b: Floats
    difference: Floats
    low: Floats
    high: Floats
    count_a: NDArray[np.int64]
    count_b: NDArray[np.int64]


def mean_differences(a: Floats, b: Floats, *, paired: bool, level: float) -> Differences:
    r"""Differences :math:`\bar b - \bar a` over the columns with Student's interval (paired) or Welch's (unpaired).

    **Estimate.** Correct for normal values. The degrees of freedom are :math:`n - 1` for pairs, and those of Welch and
    Satterthwaite for two independent samples of different variance.

    Args:
        a: shape ``(rows, sequences)``, NaN where undefined.
        b: the same number of rows; the same shape if paired.
        paired: whether column i of ``a`` belongs to column i of ``b``. A pair with a NaN on either side is dropped.
        level: level of the interval, such as 0.95.

    Example:
        >>> found = mean_differences(np.zeros((1, 4)), np.array([[1.0, 2.0, 3.0, 4.0]]), paired=True, level=0.95)
        >>> found.difference[0].item(), round(found.low[0].item(), 3), round(found.high[0].item(), 3)
        (2.5, 0.446, 4.554)
    """
    from scipy.special import stdtrit

    if paired:
        missing = np.isnan(a) | np.isnan(b)
        a, b = np.where(missing, np.nan, a), np.where(missing, np.nan, b)
    mean_a, error_a, count_a = _mean(a)
    mean_b, error_b, count_b = _mean(b)
    with np.errstate(invalid="ignore", divide="ignore"):
        if paired:
            _, squared, count = _mean(b - a)
            degrees = count - 1.0
        else:
            squared = error_a + error_b
            degrees = squared**2 / (error_a**2 / (count_a - 1.0) + error_b**2 / (count_b - 1.0))
        # Values that are all equal have no spread, and an interval of length zero.
        half = np.where(squared == 0, 0.0, stdtrit(degrees, 0.5 + level / 2) * np.sqrt(squared))
    half[np.minimum(count_a, count_b) < 2] = np.nan
    difference = mean_b - mean_a
    return Differences(mean_a, mean_b, difference, difference - half, difference + half, count_a, count_b)


def _mean(values: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Per row: the mean of the known values, the squared standard error of it, and their number."""
    known = np.isfinite(values)
    count = known.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, values, 0.0).sum(axis=1) / count
        spread = np.where(known, values - mean[:, None], 0.0)
        squared_error = (spread**2).sum(axis=1) / (count - 1.0) / count
    return mean, squared_error, count
