"""Sparklines: a curve small enough for a cell, as levels between 0 and 1 and as one line of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEAST_SPAN = 0.25
"""Changes below a quarter of the largest value do not fill the height, so that a flat curve reads as flat."""

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.-=+*#@"
WIDEST = 24
GAP = " "


def levels(values: Sequence[float], width: int) -> NDArray[np.float64]:
    """Scale ``values`` to between 0 and 1, at most ``width`` of them; missing ones are NaN, empty if all are missing.

    More values than ``width`` are averaged in consecutive groups.

    Example:
        >>> levels([2.0, 3.0, 4.0], width=8).tolist()
        [0.0, 0.5, 1.0]
    """
    points = np.asarray(values, dtype=np.float64)
    if points.size > width:
        points = np.array([_mean(group) for group in np.array_split(points, width)])
    known = points[np.isfinite(points)]
    if known.size == 0:
        return np.empty(0)
    low, high = float(known.min()), float(known.max())
    span = max(high - low, LEAST_SPAN * max(abs(low), abs(high)))
    if span == 0:
        return np.where(np.isfinite(points), 0.5, np.nan)
    heights: NDArray[np.float64] = np.clip(0.5 + (points - (low + high) / 2) / span, 0.0, 1.0)
    return np.where(np.isfinite(points), heights, np.nan)


def _mean(group: NDArray[np.float64]) -> float:
    known = group[np.isfinite(group)]
    return float(known.mean()) if known.size else float("nan")


def sparkline(values: Sequence[float], *, plain: bool = False, width: int = WIDEST) -> str:
    """``values`` as one line of bars, with a gap for each missing value; see :func:`levels`.

    Args:
        values: the curve.
        plain: use ASCII only.
        width: maximum number of characters.

    Example:
        >>> sparkline([0.0, 0.5, 1.0], plain=True)
        '_+@'
    """
    bars = PLAIN_BARS if plain else BARS
    return "".join(GAP if not np.isfinite(x) else bars[round(x * (len(bars) - 1))] for x in levels(values, width))
