"""Numbers of the table of mechanisms in words."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.papers.mechanisms.summing import End, Fate, Line
from rankscope.views import number

DASH = "–"
FATES: Mapping[Fate, str] = {
    "vanish": "tokens vanish",
    "grow": "tokens grow out of range",
    "equal": "too little to tell",
}


def rate_words(line: Line, variant: str) -> str:
    """The factor per block of order 1, the level of order 0."""
    if variant in line.factor:
        return f"× {number(line.factor[variant])}"
    if variant in line.level:
        return f"= {number(line.level[variant])}"
    return DASH


def end_words(end: End | None) -> str:
    """A relative residual as the table shows it."""
    if end is None:
        return DASH
    if end.log10 is None:
        return "none: in the first block " + FATES[end.fate or "equal"]
    value = log10_words(end.log10)
    return value if end.lost_after is None else f"{value} at block {end.lost_after}, then {FATES[end.fate or 'equal']}"


def log10_words(log10: float) -> str:
    """A number given by its logarithm, as a power of ten where it is small."""
    if log10 > -3:
        return number(10**log10)
    return f"10<sup>−{abs(log10):.1f}</sup>" if log10 > -1000 else f"10<sup>−{abs(log10):.0f}</sup>"
