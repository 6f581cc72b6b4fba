"""A curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankscope.runs.courses import levels

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.-=+*#@"
WIDEST = 24
GAP = " "


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
    return "".join(GAP if not np.isfinite(x) else bars[round(x * (len(bars) - 1))] for x in levels(values, width))
