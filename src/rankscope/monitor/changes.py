"""How far each value is from what it was over the last readings, relative to how much it changed before."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from rankscope.monitor.alarms import LevelChange

BASE = 5
"""Readings whose median is the level before a change."""
LEAST_HISTORY = 8
"""Changes that must be known before another one can be called large."""
KEPT = 24
"""Changes that are remembered."""
RESOLVED = 0.02
"""Smallest change, as a share of the value, that earlier changes are taken to allow: what does not move at all, such as
a frozen layer, would otherwise make every change infinitely large."""


class Series:
    """One metric at one layer over the readings, in constant memory.

    The change of a reading is the distance of its logarithm from the median of the five readings before. A shift of
    level must show in two readings in a row, both compared with the level before the first of them: the score is the
    smaller of the two distances, each divided by the largest distance of the same kind that was seen before. What
    drifts, fast or slowly, changes by similar amounts in every reading and has a score near 1.

    Example:
        >>> series = Series()
        >>> scores = [series.take(value).score for value in [1.0, 1.1] * 10 + [2.0, 2.1, 2.0]]
        >>> [round(score, 1) for score in scores[-3:]]
        [1.0, 6.3, 0.9]
    """

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=BASE + 2)
        self._near: deque[float] = deque(maxlen=KEPT)
        self._far: deque[float] = deque(maxlen=KEPT)
        self._pending: float | None = None

    def take(self, value: float) -> LevelChange:
        """Add a reading; how far it and the one before are from those before them."""
        if not (math.isfinite(value) and value > 0.0):
            return LevelChange(0.0, math.nan)
        self._values.append(math.log(value))
        if len(self._values) < BASE + 2:
            return LevelChange(0.0, math.nan)
        values = list(self._values)
        level = median(values[:BASE])
        near, far = values[BASE] - level, values[BASE + 1] - level
        score = 0.0
        if len(self._far) >= LEAST_HISTORY and near * far > 0.0:
            score = min(abs(near) / max(RESOLVED, *self._near), abs(far) / max(RESOLVED, *self._far))
        self._near.append(abs(near))
        # The last distance is that of the reading before, which belongs to the change that is looked for.
        if self._pending is not None:
            self._far.append(self._pending)
        self._pending = abs(far)
        return LevelChange(score, math.exp(level))
