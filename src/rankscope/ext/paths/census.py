"""The exact number of paths of each length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rankscope._citations import Cite

CITES = (Cite("dong2021attention", "thm. 2.1"),)


@dataclass(frozen=True)
class Census:
    """Paths from the embedding to the output, by length.

    Attributes:
        counts: number of paths of length 0, 1, ..., exact.
    """

    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """All paths."""
        return sum(self.counts)

    @property
    def mean_length(self) -> Fraction:
        """Mean length of a path drawn uniformly."""
        return Fraction(sum(length * count for length, count in enumerate(self.counts)), self.total)


def census(heads: Sequence[int], skips: Sequence[bool] | None = None) -> Census:
    r"""Count paths: the coefficients of :math:`\prod_l (1 + H_l z)`, without the 1 if a skip is removed. Exact.

    With skips and H heads in each of L layers, that is :math:`\binom{L}{k} H^k`, so the length of a path drawn
    uniformly is binomial with probability :math:`H / (1 + H)`.

    Args:
        heads: number of heads of each attention layer.
        skips: whether each layer has a skip; None for all.

    Example:
        >>> census([12] * 12).total, round(float(census([12] * 12).mean_length), 2)
        (23298085122481, 11.08)
    """
    counts = [1]
    for number, passes in zip(heads, skips if skips is not None else [True] * len(heads), strict=True):
        longer = [0, *(number * count for count in counts)]
        kept = [*(count if passes else 0 for count in counts), 0]
        counts = [a + b for a, b in zip(longer, kept, strict=True)]
    return Census(tuple(counts))
