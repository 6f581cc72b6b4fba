r"""Graphs in which each token sees one stretch of tokens around itself: everything in O(n log n), no edge listed. Ours.

Let token i see :math:`[s_i, e_i)` with :math:`s_i \le i < e_i`, both ends non-decreasing in i: windows, causal masks,
prefixes. The set reached from a token is then an interval [a, b] at every step, and its two ends move
independently: a to the first i with :math:`e_i > a`, b to the last i with :math:`s_i \le b`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Intervals:
    """Token i sees ``start[i] <= j < stop[i]``; see :func:`intervals_of` for the guarantees."""

    start: Ints
    stop: Ints

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.start)

    @property
    def lengths(self) -> Ints:
        """Number of tokens that each token sees."""
        return self.stop - self.start

    @property
    def edges(self) -> int:
        """Number of pairs."""
        return int(self.lengths.sum())

    @property
    def is_triangular(self) -> bool:
        """Whether no token sees a later one."""
        return bool((self.stop == np.arange(self.tokens) + 1).all())

    @property
    def is_complete(self) -> bool:
        """Whether all see all."""
        return bool((self.start == 0).all() and (self.stop == self.tokens).all())

    def mean_over_seen(self, x: Any) -> Any:
        """P0 x: each token's mean over what it sees, by prefix sums."""
        sums = np.concatenate([np.zeros((1, *x.shape[1:])), np.cumsum(x, axis=0)])
        seen = sums[self.stop] - sums[self.start]
        return seen / self.lengths.reshape(-1, *([1] * (x.ndim - 1)))


def intervals_of(start: Ints, stop: Ints) -> Intervals | None:
    """The intervals, if each contains its own token and both ends are non-decreasing; None otherwise.

    Example:
        >>> intervals_of(np.array([0, 0, 1]), np.array([1, 2, 3])) is None
        False
        >>> intervals_of(np.array([0, 2, 2]), np.array([1, 3, 3])) is None
        True
    """
    own = np.arange(len(start))
    holds_itself = bool((start <= own).all() and (stop > own).all())
    monotone = bool((np.diff(start) >= 0).all() and (np.diff(stop) >= 0).all())
    return Intervals(start, stop) if holds_itself and monotone else None


def eccentricities(graph: Intervals) -> Floats:
    """Layers after which a token's information has reached every token; inf if it never does. **Exact**.

    Example:
        Token 3 of seven in a row is three steps from both ends.

        >>> own = np.arange(7)
        >>> eccentricities(Intervals(np.maximum(own - 1, 0), np.minimum(own + 2, 7))).tolist()
        [6.0, 5.0, 4.0, 3.0, 4.0, 5.0, 6.0]
    """
    own = np.arange(graph.tokens)
    left = _steps(np.searchsorted(graph.stop, own, side="right"))
    # the same, with tokens counted from the other end
    right = _steps(graph.tokens - np.searchsorted(graph.start, own[::-1], side="right"))[::-1]
    return np.maximum(left, right)


def component_of(graph: Intervals) -> Ints:
    """Number of the strongly connected interval of each token, from 0 in order. **Exact**."""
    own = np.arange(graph.tokens)
    stuck_left = np.searchsorted(graph.stop, own, side="right") == own
    stuck_right = np.searchsorted(graph.start, own, side="right") - 1 == own
    cuts = stuck_left[1:] | stuck_right[:-1]
    return np.concatenate([[0], np.cumsum(cuts, dtype=np.int64)])


def _steps(towards_zero: Ints) -> Floats:
    """Number of moves i -> towards_zero[i] <= i until 0 is reached; inf for those that stop before."""
    steps = [0.0] * len(towards_zero)
    for place, after in enumerate(towards_zero.tolist()):
        if place:
            steps[place] = steps[after] + 1 if after < place else float("inf")
    return np.array(steps)
