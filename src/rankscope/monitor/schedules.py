"""When to take a reading: three schedules, each a rule that decides step by step."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar, Protocol

from rankscope.errors import InputError

DEFAULT_SHARE = 0.01


class Schedule(Protocol):
    """Decides which steps are read. Steps are increasing integers, not necessarily consecutive.

    Attributes:
        by_clock: the decision depends on the clock, so ranks have to agree on it.
    """

    @property
    def by_clock(self) -> bool:
        """Whether two ranks could decide differently."""
        ...

    def wants(self, step: int, now: float) -> bool:
        """Whether ``step``, reached at this time of a monotonic clock, should be read."""
        ...

    def was_read(self, step: int, seconds: float) -> None:
        """Record that ``step`` was read, and how many seconds that took."""
        ...


@dataclass
class Linear:
    """The first step, then every ``every`` steps.

    Example:
        >>> schedule = Linear(100)
        >>> schedule.was_read(250, 0.1)
        >>> [step for step in (251, 299, 300, 301) if schedule.wants(step, 0.0)]
        [300, 301]
    """

    every: int
    by_clock: ClassVar[bool] = False
    _last: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"every={self.every}: expected at least 1 step between readings.")

    def wants(self, step: int, now: float) -> bool:
        """Whether there is a multiple of ``every`` between the last reading and this step."""
        return self._last is None or step // self.every > self._last // self.every

    def was_read(self, step: int, seconds: float) -> None:
        """Remember the step."""
        self._last = step


@dataclass
class Logarithmic:
    """The first step, then steps that grow by a factor: densely at the start.

    Example:
        >>> schedule, read = Logarithmic(factor=2.0), []
        >>> for step in range(10):
        ...     if schedule.wants(step, 0.0):
        ...         read.append(step)
        ...         schedule.was_read(step, 0.0)
        >>> read
        [0, 1, 2, 4, 8]
    """

    factor: float = 1.2
    by_clock: ClassVar[bool] = False
    _last: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 1.0):
            raise InputError(f"factor={self.factor}: expected a number above 1.")

    def wants(self, step: int, now: float) -> bool:
        """Whether the step is at least the factor times the last one read, and at least one more."""
        return self._last is None or step >= max(self._last + 1, math.ceil(self._last * self.factor))

    def was_read(self, step: int, seconds: float) -> None:
        """Remember the step."""
        self._last = step


@dataclass
class WallTime:
    """As often as a share of the wall time allows; adapts to the cost of readings and steps.

    The first step is read, because alarms compare with the run's own start; its cost is amortised before the
    next. A further reading is due once the time spent, including that reading, is at most ``share`` of the time since
    the gauge was first called. A run that is shorter than the first reading divided by ``share`` exceeds it.

    Attributes:
        share: share of the wall time, above 0 and below 1.

    Example:
        >>> schedule = WallTime(share=0.01)
        >>> schedule.wants(0, now=0.0)
        True
        >>> schedule.was_read(0, seconds=0.5)
        >>> schedule.wants(1, now=99.0), schedule.wants(2, now=100.0)
        (False, True)
    """

    share: float = DEFAULT_SHARE
    by_clock: ClassVar[bool] = True
    _spent: float = field(default=0.0, repr=False)
    _costs: tuple[float, ...] = field(default=(), repr=False)
    _start: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0:
            raise InputError(f"share={self.share}: expected a share of wall time between 0 and 1, e.g. 0.01.")

    def wants(self, step: int, now: float) -> bool:
        """Whether one more reading is within the share."""
        if self._start is None:
            self._start = now
        if not self._costs:
            return True
        return self._spent + median(self._costs) <= self.share * (now - self._start)

    def was_read(self, step: int, seconds: float) -> None:
        """Remember the cost; the last three are used to predict the next."""
        self._spent += seconds
        self._costs = (*self._costs, seconds)[-3:]


def as_schedule(given: str | int | Schedule) -> Schedule:
    """``"1%"``, ``"log"``, a whole number of steps, or a schedule.

    Example:
        >>> as_schedule("0.5%")
        WallTime(share=0.005)
    """
    if isinstance(given, bool):
        raise InputError(f"schedule={given!r}: expected a share such as '1%', 'log', or a number of steps.")
    if isinstance(given, int):
        return Linear(given)
    if not isinstance(given, str):
        return given
    if given in ("log", "logarithmic"):
        return Logarithmic()
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", given.strip())
    if share is None:
        raise InputError(f"schedule={given!r}: expected a share such as '1%', 'log', or a number of steps.")
    return WallTime(float(share[1]) / 100.0)
