"""The loss of every step, and whether it jumped and stays above all of its past."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

LASTING = 64
"""Steps for which a loss has to stay above all of its past, before it is said to."""
RISE = 0.08
"""Share of the loss before, by which it has to rise."""
SPREADS = 2.0
"""Standard deviations of the loss of single steps, by which it has to rise."""
NEAR, SUDDEN = 16, 4
"""Steps before and after the onset of a rise that are told, and those between which it has to jump."""


@dataclass(frozen=True)
class Rise:
    """A loss that stays above all of its past.

    Attributes:
        step: the onset.
        before: median of the steps before it.
        after: median of the first steps of the rise.
        size: from the largest of the four steps before to the least of four after, in units of what is a jump.
    """

    step: int
    before: float
    after: float
    size: float


class LossLevel:
    """Given the loss of every step, also of those that are not read.

    Example:
        >>> level = LossLevel()
        >>> for step in range(200):
        ...     level.take(step, 3.0 - 0.01 * step + 0.1 * (step % 3) + 2.0 * (step >= 120))
        >>> level.rise().step
        120
    """

    def __init__(self) -> None:
        self._losses: deque[tuple[int, float]] = deque(maxlen=4 * LASTING)

    def take(self, step: int, loss: float) -> None:
        """Add the loss of a step."""
        if math.isfinite(loss):
            self._losses.append((step, loss))

    def forget(self) -> None:
        """Start over: the losses that follow are those of another objective, and do not compare."""
        self._losses.clear()

    def rise(self) -> Rise | None:
        """Since when the loss has stayed above all of its past, in means of eight steps, for 64 steps at least."""
        steps, losses = zip(*self._losses, strict=True) if self._losses else ((), ())
        ends = range(len(losses), 7, -8)
        means = [math.fsum(losses[end - 8 : end]) / 8 for end in ends]
        for number in range(LASTING // 8, len(means) - 3):
            if min(means[:number]) > max(means[number:]):
                first = len(losses) - 8 * number
                return self._rise(steps, losses, first)
        return None

    @staticmethod
    def _rise(steps: Sequence[int], losses: Sequence[float], first: int) -> Rise:
        """The onset, to the step: the first one above the largest of the 16 before the means that rose."""
        top = max(losses[max(0, first - NEAR) : max(1, first - 8)])
        first = next((place for place in range(max(0, first - 8), first + 8) if losses[place] > top), first)
        before, after = (median(losses[place : place + NEAR]) for place in (max(0, first - NEAR), first))
        # Of differences of neighbours, which a trend hardly changes.
        past = losses[:first]
        # 1.4826 medians of absolute values are a standard deviation of a normal distribution.
        spread = 1.4826 * median(abs(later - earlier) for earlier, later in pairwise(past)) / math.sqrt(2.0)
        limit = max(RISE * abs(before), SPREADS * spread)
        # At once: the losses of two networks that play against each other rise within some steps.
        jump = min(losses[first : first + SUDDEN]) - max(losses[max(0, first - SUDDEN) : first], default=before)
        return Rise(steps[first], before, after, jump / limit if limit > 0.0 else math.inf)
