"""Rank statistics with their bootstrap intervals: how well a score before training predicts what training reaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.ext.papers._curves import Array

DRAWS, LEVEL = 2000, 0.95


@dataclass(frozen=True)
class BootstrapInterval:
    """A statistic and the ends of its bootstrap interval; NaN where it is not defined."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if not np.isfinite(self.value):
            return "(not defined: all learned, or none)"
        return f"{self.value:.2f}" + (f" (95%: {self.low:.2f} to {self.high:.2f})" if np.isfinite(self.low) else "")


def mean_ranks(values: Array) -> Array:
    """Ranks from 1; equal values share the mean of theirs.

    Example:
        >>> mean_ranks(np.array([5.0, 2.0, 5.0])).tolist()
        [2.5, 1.0, 2.5]
    """
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    ranks: Array = (last - (count - 1) / 2)[place]
    return ranks


def area_under_curve(score: Array, outcome: Array, threshold: float = 0.5) -> float:
    """Probability that a network that trained has a higher score than one that did not; ties count half.

    **Exact.** 1 when the score separates them, 0.5 when it says nothing, NaN when all trained or none did.

    Args:
        score: known before training.
        outcome: what training reached.
        threshold: at or above it counts as trained.

    Example:
        >>> area_under_curve(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 1.0, 0.0, 1.0]))
        0.75
    """
    trained = outcome >= threshold
    yes, no = int(trained.sum()), int((~trained).sum())
    if not yes or not no:
        return float("nan")
    above = mean_ranks(score)[trained].sum() - yes * (yes + 1) / 2
    return float(above / (yes * no))


def rank_correlation(score: Array, outcome: Array) -> float:
    """Spearman's correlation of a score with what training reached.

    **Exact.** From -1 to 1; NaN where either is constant.

    Example:
        >>> rank_correlation(np.array([1.0, 2.0, 30.0]), np.array([0.1, 0.2, 0.3]))
        1.0
    """
    ranks = mean_ranks(score), mean_ranks(outcome)
    if any(np.ptp(rank) == 0 for rank in ranks):
        return float("nan")
    centred = [rank - rank.mean() for rank in ranks]
    return float(round(centred[0] @ centred[1] / np.sqrt((centred[0] @ centred[0]) * (centred[1] @ centred[1])), 12))


def with_interval(
    statistic: Callable[[Array, Array], float],
    score: Array,
    outcome: Array,
    group: NDArray[np.int64],
    *,
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: int = 0,
) -> BootstrapInterval:
    """A statistic with its percentile bootstrap interval over groups.

    **Estimate.** Whole groups are resampled (all seeds of a design together), because seeds of one design are not
    independent designs. Draws on which the statistic is undefined are left out.

    Args:
        statistic: of a score and an outcome.
        score: one per network.
        outcome: one per network.
        group: number of the design each network belongs to.
        draws: resamples.
        level: of the interval.
        seed: of the draws.
    """
    members = [np.flatnonzero(group == number) for number in np.unique(group)]
    random = np.random.default_rng(seed)
    resamples = []
    for _ in range(draws):
        taken = np.concatenate([members[i] for i in random.integers(0, len(members), len(members))])
        resamples.append(statistic(score[taken], outcome[taken]))
    known = np.array(resamples)[np.isfinite(resamples)]
    if not known.size:
        return BootstrapInterval(statistic(score, outcome), float("nan"), float("nan"))
    low, high = np.quantile(known, ((1 - level) / 2, (1 + level) / 2))
    return BootstrapInterval(statistic(score, outcome), float(low), float(high))
