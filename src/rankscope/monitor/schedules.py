"""When to take a reading: every so many steps, or within a share of the wall time."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from rankscope.errors import InputError


class Schedule:
    """Decides which steps are read. Steps are increasing integers, not necessarily consecutive.

    Attributes:
        by_clock: the decision depends on the clock, so ranks have to agree on it.
    """

    by_clock: ClassVar[bool] = False
    _last: int | None = None

    def wants(self, step: int, now: float) -> bool:
        """Whether ``step``, reached at this time of a monotonic clock, should be read."""
        raise NotImplementedError

    def was_read(self, step: int, seconds: float) -> None:
        """Record that ``step`` was read, and how many seconds that took."""
        self._last = step

    def notice(self, step: int, name: str, value: float) -> None:
        """Look at the loss or the norm of the gradient of a step, which may be one that is not read."""


@dataclass
class Linear(Schedule):
    """The first step, then every ``every`` steps.

    Example:
        >>> schedule = Linear(100)
        >>> schedule.was_read(250, 0.1)
        >>> [step for step in (251, 299, 300, 301) if schedule.wants(step, 0.0)]
        [300, 301]
    """

    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"every={self.every}: expected at least 1 step between readings.")

    def wants(self, step: int, now: float) -> bool:
        """Whether there is a multiple of ``every`` between the last reading and this step."""
        return self._last is None or step // self.every > self._last // self.every


def dense_start(since: int, last: int) -> bool:
    """Whether the grid 0, 1, ..., 8, 10, 12, 14, 16, 20, ... has a point after ``last`` and up to ``since``.

    Four readings per doubling: 23 in the first 100 steps, 29 in 300, 37 in 1,000.

    Example:
        >>> [step for step in range(33) if dense_start(step, step - 1)]
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32]
    """
    gap = max(1, 2 ** (since.bit_length() - 1) // 4) if since > 0 else 1
    return since // gap * gap > last


AFTER = (0, 1, 3, 8, 12, 16)
"""Steps after a jump that are read, if its value is known by then."""


class Jumps:
    """Tells when the loss or the norm of the gradient leaves the range of the last steps.

    A value jumps if it is further from the median of the last sixteen than three times the furthest of them, and by a
    tenth of that median at least; or if it is not finite. That step is then worth a reading, and so are the next
    one and four later ones, which show whether it lasts. Each jump that was looked at doubles the number of
    steps until the next one counts.
    """

    def __init__(self) -> None:
        self._last: dict[str, deque[float]] = {}
        self._jumped, self._quiet_until = -(AFTER[-1] + 1), -1
        self._pause = 2 * AFTER[-1]

    def take(self, step: int, name: str, value: float) -> None:
        """Add the value of a step."""
        kept = self._last.setdefault(name, deque(maxlen=16))
        if len(kept) >= 8 and step >= self._quiet_until and _leaves(kept, value):
            self._jumped, self._quiet_until = step, step + self._pause
            self._pause *= 2
            kept.clear()
        if math.isfinite(value):
            kept.append(value)

    def wants(self, step: int) -> bool:
        """Whether a value jumped at this step, or one, three, 8, 12 or 16 steps ago."""
        return step - self._jumped in AFTER


def _leaves(kept: Sequence[float], value: float) -> bool:
    if not math.isfinite(value):
        return True
    level = median(kept)
    furthest = max(abs(one - level) for one in kept)
    return abs(value - level) > max(3.0 * furthest, 0.1 * abs(level))


@dataclass
class WallTime(Schedule):
    """Densely at the start and after jumps, else as often as a share of the wall time allows.

    - The first steps are read on a grid that gets coarser with the steps (:func:`dense_start`), so that a run of 100
      steps has 23 readings; this is the only part that may cost more than ``share``, in runs of some thousand steps at
      most.
    - Six of 17 steps are read once the loss or the norm of the gradient jumps (:class:`Jumps`).
    - Apart from these, a reading is due once the time spent on readings, including the next one, is at most ``share``
      of the time since the gauge was first called. The first reading is left out of the account and of the forecast:
      it sets up what later ones reuse.

    Attributes:
        share: share of the wall time, above 0 and below 1.

    Example:
        >>> schedule = WallTime(share=0.01)
        >>> read = []
        >>> for step in range(300):
        ...     if schedule.wants(step, now=0.1 * step):
        ...         schedule.was_read(step, seconds=1.0 if step == 0 else 0.3)
        ...         read.append(step)
        >>> len(read), read[:13]
        (29, [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16])
    """

    share: float = 0.01
    by_clock: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0:
            raise InputError(f"share={self.share}: expected a share of wall time between 0 and 1, e.g. 0.01.")
        self._spent, self._costs = 0.0, deque[float](maxlen=3)
        self._start: float | None = None
        self._first = 0
        self._jumps = Jumps()

    def wants(self, step: int, now: float) -> bool:
        """Whether the step belongs to the dense start, follows a jump, or is within the share."""
        if self._start is None:
            self._start = now
        if self._last is None:
            return True
        if dense_start(step - self._first, self._last - self._first) or self._jumps.wants(step):
            return True
        return bool(self._costs) and self._spent + median(self._costs) <= self.share * (now - self._start)

    def was_read(self, step: int, seconds: float) -> None:
        """Remember the step, and the cost unless it is the first; the last three are used to predict the next."""
        if self._last is None:
            self._first = step
        else:
            self._spent += seconds
            self._costs.append(seconds)
        self._last = step

    def notice(self, step: int, name: str, value: float) -> None:
        """Look at the loss or the norm of the gradient of a step."""
        self._jumps.take(step, name, value)


def as_schedule(given: str | int | Schedule) -> Schedule:
    """``"1%"``, a whole number of steps, or a schedule.

    Example:
        >>> as_schedule("0.5%")
        WallTime(share=0.005)
    """
    if isinstance(given, int) and not isinstance(given, bool):
        return Linear(given)
    if not isinstance(given, str | bool):
        return given
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", str(given).strip())
    if share is None:
        raise InputError(f"schedule={given!r}: expected a share such as '1%', or a number of steps.")
    return WallTime(float(share[1]) / 100.0)
