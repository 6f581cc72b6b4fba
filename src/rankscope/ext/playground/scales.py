"""The vertical axis of the playground's curve: logarithms from 0 down to minus billions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FAR_BELOW = -40.0
"""log10 below which the exponent itself is drawn on a logarithmic scale."""

KNEE = 0.2
"""Exponent around which the stretched scale turns from linear to logarithmic: room for the float floors."""


@dataclass(frozen=True)
class DepthAxis:
    """Maps a log10 to a position between top (0) and bottom (1).

    Attributes:
        bottom: the smallest value to draw.
        stretched: use a logarithmic scale for the exponent itself, so that doubly exponential decay is a straight line.

    Example:
        >>> axis = DepthAxis(-10.0, False)
        >>> axis.place(-5.0), [tick for tick, _ in axis.ticks()]
        (0.5, [0.0, -2.0, -4.0, -6.0, -8.0, -10.0])
    """

    bottom: float
    stretched: bool

    @classmethod
    def holding(cls, values: Sequence[float]) -> DepthAxis:
        """The axis for these values; values that are not finite are ignored."""
        least = min((value for value in values if math.isfinite(value)), default=-1.0)
        if least < FAR_BELOW:
            return cls(least * 1.3, True)
        return cls(min(-1.0, math.floor(least * 1.05)), False)

    def place(self, value: float) -> float:
        """Position as a fraction of the height, from the top; values above 0 count as 0."""
        depth = max(0.0, -value)
        if self.stretched:
            return math.asinh(depth / KNEE) / math.asinh(-self.bottom / KNEE)
        return depth / -self.bottom

    def ticks(self) -> list[tuple[float, str]]:
        """Tick values, and their labels as exponents of ten."""
        if not self.stretched:
            step = next(size for size in (0.25, 0.5, 1.0, 2.0, 5.0, 10.0) if -self.bottom / size <= 6.5)
            count = int(-self.bottom / step + 1e-9)
            return [(0.0 - step * k, exponent(0.0 - step * k)) for k in range(count + 1)]
        powers = int(math.log10(-self.bottom))
        step = max(1, math.ceil(powers / 5))
        marks = [0.0, -1.0, *(-(10.0**k) for k in range(step, powers + 1, step))]
        return [(mark, exponent(mark)) for mark in marks]


def exponent(value: float) -> str:
    """Format an exponent of ten, with a true minus sign.

    Example:
        >>> exponent(-2.0), exponent(-0.5), exponent(-1000.0), exponent(-24750757617.9)
        ('−2', '−0.5', '−1,000', '−2.5 × 10¹⁰')
    """
    if value == 0:
        return "0"
    sign, size = ("−" if value < 0 else ""), abs(value)
    if size < 1e5:
        digits = f"{size:,.0f}" if size >= 100 else f"{size:.1f}" if size >= 10 else f"{size:.2f}"
        return sign + (digits.rstrip("0").rstrip(".") if "." in digits else digits)
    power = math.floor(math.log10(size))
    lead = f"{size / 10**power:.1f}"
    if lead == "10.0":
        lead, power = "1.0", power + 1
    raised = str(power).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{sign}10{raised}" if lead == "1.0" else f"{sign}{lead} × 10{raised}"
