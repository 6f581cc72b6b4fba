"""A mean over seeds with its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantiles of Student's law with 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class MeanInterval:
    """A mean and half the width of its 95% interval; infinite with one value."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if math.isinf(self.half) else f"{self.mean:.3f} ± {self.half:.3f}"


def mean_interval(values: Sequence[float]) -> MeanInterval:
    r"""Student's 95% interval :math:`\bar x\pm t\,s/\sqrt n` for the mean of independent, roughly normal values.

    Estimate.

    Example:
        >>> str(mean_interval([0.9, 1.0, 1.1]))
        '1.000 ± 0.248'
    """
    number = len(values)
    mean = statistics.fmean(values)
    if number < 2:
        return MeanInterval(mean, math.inf)
    quantile = _T_975[number - 2] if number - 2 < len(_T_975) else 1.96 + 2.5 / (number - 1)
    return MeanInterval(mean, quantile * statistics.stdev(values) / math.sqrt(number))
