"""A curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.-=+*#@"
WIDEST = 24
GAP = " "
LEAST_SPAN = 0.25


def sparkline(values: Sequence[float], *, plain: bool = False, width: int = WIDEST) -> str:
    """The course of ``values``, lowest to highest bar; a gap where a value is missing.

    More values than ``width`` are averaged in consecutive groups. Changes below a quarter of the largest value do not
    fill the height, so that a flat curve reads as flat.

    Args:
        values: the curve.
        plain: use ASCII only.
        width: most characters.

    Example:
        >>> sparkline([0.0, 0.5, 1.0], plain=True)
        '_+@'
    """
    bars = PLAIN_BARS if plain else BARS
    points = np.asarray(values, dtype=np.float64)
    if points.size > width:
        points = np.array([_mean(group) for group in np.array_split(points, width)])
    known = points[np.isfinite(points)]
    if known.size == 0:
        return ""
    low, high = float(known.min()), float(known.max())
    span = max(high - low, LEAST_SPAN * max(abs(low), abs(high)))
    levels = 0.5 + (points - (low + high) / 2) / span if span > 0 else np.where(np.isfinite(points), 0.5, np.nan)
    return "".join(GAP if not np.isfinite(x) else bars[round(x * (len(bars) - 1))] for x in levels)


def _mean(group: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    known = group[np.isfinite(group)]
    return float(known.mean()) if known.size else float("nan")
