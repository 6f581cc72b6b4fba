"""How far each value is from what it was over the last readings, relative to how much it changed before."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import median

from rankscope.monitor.alarms import LevelChange
from rankscope.monitor.alarms.loss_shift import LASTS, rise

BASE = 5
"""Readings whose median is the level before a change."""
LEAST_HISTORY = 8
"""Changes that must be known before another one can be called large."""
KEPT = 24
"""Changes that are remembered."""
RESOLVED = 0.05
"""Smallest change, as a share of the value, that earlier changes are taken to allow: what does not move at all, such as
a frozen layer, would otherwise make every change infinitely large."""
RESOLVED_OF_BATCH = 0.02
"""The same for facts about batches, which have no slow phases to hide a change in."""


LAG = 8
"""Readings after which a value counts as one of the past that growth is measured against."""


class Series:
    """One metric at one layer over the readings, in constant memory.

    The change of a reading is the distance of its logarithm from a base: the median of the five readings before, or
    the reading just before. A shift of level must show in two readings in a row, both compared with the base before the
    first of them: the score is the smaller of the two distances, each divided by the largest distance of the same kind
    that was seen before, for the base for which it is larger. What drifts, fast or slowly, changes by similar amounts
    in every reading and has a score near 1. The median suits values that vary from batch to batch, and the last reading
    those that drift, whose distance from a median is several readings long.

    Args:
        resolved: the smallest change that earlier ones are taken to allow.

    Example:
        >>> series = Series()
        >>> scores = [series.take(value).score for value in [1.0, 1.1] * 10 + [2.0, 2.1, 2.0]]
        >>> [round(score, 1) for score in scores[-3:]]
        [1.0, 6.3, 0.9]
    """

    def __init__(self, resolved: float = RESOLVED) -> None:
        self._values: deque[float] = deque(maxlen=BASE + 2)
        self._from_median, self._from_last = _Distances(resolved), _Distances(resolved)

    def take(self, value: float) -> LevelChange:
        """Add a reading; how far it and the one before are from those before them."""
        if not (math.isfinite(value) and value > 0.0):
            return LevelChange(0.0, math.nan)
        self._values.append(math.log(value))
        values = list(self._values)
        if len(values) < 3:
            return LevelChange(0.0, math.nan)
        last = values[-3]
        found = LevelChange(self._from_last.score(values[-2] - last, values[-1] - last), math.exp(last))
        if len(values) == BASE + 2:
            level = median(values[:BASE])
            score = self._from_median.score(values[-2] - level, values[-1] - level)
            found = LevelChange(score, math.exp(level)) if score >= found.score else found
        return found


class _Distances:
    """The distances of two readings in a row from one base, and the largest of those before."""

    def __init__(self, resolved: float) -> None:
        self._resolved = resolved
        self._near: deque[float] = deque(maxlen=KEPT)
        self._far: deque[float] = deque(maxlen=KEPT)
        self._pending: float | None = None

    def score(self, near: float, far: float) -> float:
        """The smaller of both distances, relative to earlier ones; 0 if these are too few, or the two disagree."""
        found = 0.0
        if len(self._far) >= LEAST_HISTORY and near * far > 0.0:
            found = min(abs(near) / max(self._resolved, *self._near), abs(far) / max(self._resolved, *self._far))
        self._near.append(abs(near))
        # The last distance is that of the reading before, which belongs to the change that is looked for.
        if self._pending is not None:
            self._far.append(self._pending)
        self._pending = abs(far)
        return found


class Peak:
    """The largest value of the readings up to eight readings ago, in constant memory.

    A warm-up that raises a value in proportion to the step at most doubles it from there, because as many readings lie
    before it.

    Example:
        >>> peak = Peak()
        >>> [peak.take(float(value)) for value in range(1, 18)][-3:]
        [nan, 8.0, 9.0]
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=LAG)
        self._largest, self._number = 0.0, 0
        self._first, self._lag = 0, 0

    def take(self, value: float, step: int | None = None) -> float:
        """Add a reading; the largest of those at least eight readings before it, NaN if these are fewer than eight.

        If readings get further apart, eight of them reach back further than to half of the steps, and what a linear
        warm-up would add beyond a doubling is added to the largest.
        """
        step = self._number + len(self._recent) if step is None else step
        if not self._recent:
            self._first = step
        if len(self._recent) == LAG:
            self._lag, oldest = self._recent[0]
            self._largest, self._number = max(self._largest, oldest), self._number + 1
        self._recent.append((step, value))
        if self._number < LAG:
            return math.nan
        return self._largest * max(1.0, 0.5 * (step - self._first + 1) / (self._lag - self._first + 1))


class LossLevel:
    """The loss of the last eight steps, and its level and spread before the last sixteen.

    Given the loss of every step, also of those that are not read.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=4 * LASTING)
        self._last: deque[tuple[float, float, float]] = deque(maxlen=LASTS)
        self._worst: tuple[float, float, float] | None = None

    def take(self, loss: float) -> None:
        """Add the loss of a step."""
        if not math.isfinite(loss):
            return
        self._losses.append(loss)
        levels = self._levels()
        if levels is None:
            return
        self._last.append(levels)
        found = [min(self._last, key=lambda one: rise(*one))] if len(self._last) == LASTS else []
        losses = list(self._losses)[-48:]
        least, largest = min(losses[-LASTS:]), max(losses[-LASTS - 32 : -LASTS])
        if least > largest:
            found.append((least, largest, levels[2]))
        if self._worst is not None:
            found.append(self._worst)
        self._worst = max(found, key=lambda one: rise(*one), default=None)

    def level(self) -> tuple[float, float, float] | None:
        """The largest rise since the last call that lasted for four steps: loss, level and spread.

        Of the median of eight steps, or of the least of four steps in a row above the largest of the 32 before.
        """
        worst, self._worst = self._worst, None
        return worst

    def risen(self) -> int | None:
        """For how many steps the loss has stayed above all of its past, 64 at least, in means of eight steps.

        None if it has not.
        """
        losses = list(self._losses)
        means = [math.fsum(losses[end - 8 : end]) / 8 for end in range(len(losses), 7, -8)]
        for number in range(LASTING // 8, len(means) - 3):
            if min(means[:number]) > max(means[number:]):
                return 8 * number
        return None

    def forget(self) -> None:
        """Start over: the losses that follow are those of another objective, and do not compare."""
        self.__init__()  # type: ignore[misc]

    def _levels(self) -> tuple[float, float, float] | None:
        """Median now, median of the 16 steps before the last 16, and standard deviation of 32 steps before those 16.

        The deviation is that of differences of neighbours, which a trend hardly changes. None after fewer than 40
        steps.
        """
        if len(self._losses) < 40:
            return None
        losses = list(self._losses)[-48:]
        before = losses[:-16]
        spread = NORMAL * median(abs(later - earlier) for earlier, later in pairwise(before)) / math.sqrt(2.0)
        return median(losses[-8:]), median(before[-16:]), spread


LASTING = 64
"""Steps for which a loss has to stay above all of its past, before it is said to."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution over the median of its absolute values."""
