r"""Radius and diameter of a large sparse graph: exact by bounds on all eccentricities at once, or a bracket.

One search forward and one backward from a token bound the eccentricity of every other one,
:math:`e(x) \ge e(s) - d(s, x)`, :math:`e(x) \ge d(x, v)` and :math:`e(x) \le d(x, s) + e(s)`, and the next search
starts where the bounds are widest. What is still open at the end is searched for all tokens at once, one bit per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope._citations import Cite
from rankscope.ext.theory.graphs.bracket import Bracket
from rankscope.ext.theory.graphs.connectivity import Connectivity

_WORDS_AT_ONCE = 1 << 22
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Words = NDArray[np.uint64]


def reach_of_many(sees: Any, sources: Ints, most_layers: int) -> Floats:
    """For each source the layers after which it has reached every token; inf if ``most_layers`` are too few.

    **Exact.** One bit per source and token; a layer unites the bits of all tokens that a token sees.

    Args:
        sees: scipy csr array, entry (i, j) when i sees j; no row is empty.
        sources: tokens to start from.
        most_layers: maximum number of layers.

    Example:
        >>> from scipy.sparse import csr_array
        >>> line = csr_array(np.eye(4) + np.eye(4, k=1) + np.eye(4, k=-1))
        >>> reach_of_many(line, np.arange(4), 9).tolist()
        [3.0, 2.0, 2.0, 3.0]
    """
    reach = np.full(len(sources), np.inf)
    width = max(1, _WORDS_AT_ONCE // sees.shape[0]) * 64
    for first in range(0, len(sources), width):
        part = slice(first, first + width)
        reach[part] = _reach(sees, sources[part], most_layers)
    return reach


@dataclass(frozen=True, eq=False)
class _PatternRows:
    """A dense pattern with the row interface of a csr array."""

    indptr: Ints
    indices: Ints
    shape: tuple[int, int]


def reach_of_all(edges: NDArray[np.bool_]) -> Floats:
    """For each token of a small dense pattern the layers after which every token holds something of it. **Exact**.

    Args:
        edges: True at (i, j) if i sees j. A token keeps what it holds, even if it does not see itself.

    Example:
        >>> reach_of_all(np.tril(np.ones((3, 3), dtype=bool))).tolist()
        [1.0, inf, inf]
    """
    n = len(edges)
    rows, columns = np.nonzero(edges | np.eye(n, dtype=np.bool_))
    starts = np.searchsorted(rows, np.arange(n + 1))
    return reach_of_many(_PatternRows(starts, columns, (n, n)), np.arange(n), n - 1)


def _reach(sees: Any, sources: Ints, most_layers: int) -> Floats:
    number = np.arange(len(sources))
    held = np.zeros((sees.shape[0], (len(sources) + 63) // 64), dtype=np.uint64)
    np.bitwise_or.at(held, (sources, number // 64), np.uint64(1) << (number % 64).astype(np.uint64))
    reach = np.full(len(sources), np.inf)
    for layer in range(most_layers + 1):
        everywhere = np.bitwise_and.reduce(held, axis=0)
        full = (everywhere[number // 64] >> (number % 64).astype(np.uint64)) & np.uint64(1)
        reach[(full == 1) & np.isinf(reach)] = layer
        if layer == most_layers or not np.isinf(reach).any():
            break
        wider = held | _seen_by(sees, held)
        if np.array_equal(wider, held):
            break
        held = wider
    return reach


def _seen_by(sees: Any, held: Words) -> Words:
    """For each token the union over what it sees, a few rows at a time to keep the gathered rows small."""
    out = np.empty_like(held)
    bounds = sees.indptr.astype(np.int64)
    row = 0
    while row < sees.shape[0]:
        most = bounds[row] + max(1, _WORDS_AT_ONCE // held.shape[1])
        last = max(row + 1, int(np.searchsorted(bounds, most, side="right")) - 1)
        gathered = held[sees.indices[bounds[row] : bounds[last]]]
        np.bitwise_or.reduceat(gathered, bounds[row:last] - bounds[row], axis=0, out=out[row:last])
        row = last
    return out


CITES = (Cite("borassi2015fast"), Cite("wu2024role"))
EDGES_BUDGET = 1 << 28
"""Total number of edges that the searches may visit; takes some seconds."""
WORDS_BUDGET = 1 << 31
"""Number of 64-bit words that the search for all tokens at once may process; takes some seconds."""
NO_CENTRE = "infinite: no token reaches all others"
NOT_STRONG = "infinite: some token is not reached by some other"


def radius_and_diameter(sees: Any, how: Connectivity) -> tuple[Bracket, Bracket]:
    """Smallest and largest eccentricity of the tokens of a mask, in layers.

    **Exact** if the status says so, otherwise **Bounds** on both sides. The eccentricity of a token is the number of
    layers after which its information has reached all tokens; the radius is the least over centre nodes, the diameter
    the largest over all tokens, infinite unless the graph is strongly connected.

    Args:
        sees: scipy csr array, entry (i, j) when i sees j; no row is empty.
        how: its connectivity.

    Example:
        >>> from scipy.sparse import csr_array
        >>> from rankscope.ext.theory.graphs.connectivity import connectivity
        >>> line = csr_array(np.eye(8) + np.eye(8, k=1) + np.eye(8, k=-1))
        >>> [bracket.value for bracket in radius_and_diameter(line, connectivity(line))]
        [4.0, 7.0]
    """
    if not how.is_quasi_strong:
        infinite = Bracket.exactly(float("inf"), NO_CENTRE)
        return infinite, Bracket.exactly(float("inf"), NOT_STRONG)
    search = _Search(sees, sees.T.tocsr(), how.centres, both=how.is_strong)
    search.run()
    radius = search.bracket(float(search.low.min()), float(search.high.min()))
    if not how.is_strong:
        return radius, Bracket.exactly(float("inf"), NOT_STRONG)
    return radius, search.bracket(float(search.low.max()), float(search.high.max()))


@dataclass
class _Search:
    """Bounds on the eccentricity of each centre, narrowed search by search."""

    sees: Any
    seen: Any
    centres: Ints
    both: bool
    spent: int = 0
    low: Floats = field(init=False)
    high: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.low = np.zeros(len(self.centres))
        self.high = np.full(len(self.centres), float(self.sees.shape[0] - 1))

    def run(self) -> None:
        degrees = np.diff(self.seen.indptr)[self.centres]
        place: int | None = int(degrees.argmax())
        turn = 0
        while place is not None and self.spent + 3 * self.sees.nnz <= EDGES_BUDGET:
            self._from(place)
            turn += 1
            place = self._next(turn)
        self._all_at_once()

    def _from(self, place: int) -> None:
        token = int(self.centres[place])
        out = self._depths(self.seen, token)
        eccentricity = float(out.max())
        self.low[place] = self.high[place] = eccentricity
        self._narrow(
            low=eccentricity - out[self.centres], high=self._depths(self.sees, token)[self.centres] + eccentricity
        )
        self._narrow(low=self._depths(self.sees, int(out.argmax()))[self.centres])

    def _narrow(self, low: Floats, high: Floats | None = None) -> None:
        self.low = np.maximum(self.low, low)
        if high is not None:
            self.high = np.minimum(self.high, high)

    def _next(self, turn: int) -> int | None:
        """The token with the widest bounds, for the radius and the diameter in turn; None if both are known."""
        small, large = self._open_for_radius(), self._open_for_diameter()
        if len(small) and (turn % 2 == 0 or not len(large)):
            return int(small[np.lexsort((self.high[small], self.low[small]))[0]])
        return int(large[np.lexsort((-self.low[large], -self.high[large]))[0]]) if len(large) else None

    def _open_for_radius(self) -> Ints:
        return np.flatnonzero((self.low < self.high.min()) & (self.low < self.high))

    def _open_for_diameter(self) -> Ints:
        return np.flatnonzero((self.high > self.low.max()) & (self.low < self.high)) if self.both else np.empty(0, int)

    def _all_at_once(self) -> None:
        places = np.union1d(self._open_for_radius(), self._open_for_diameter())
        if not len(places):
            return
        layers = int(self.high[places].max())
        # the number of layers is not known: use the lower bound of the widest token, plus one
        expected = int(self.low[places].max()) + 1
        if self.sees.nnz * ((len(places) + 63) // 64) * expected > WORDS_BUDGET:
            return
        reach = reach_of_many(self.sees, self.centres[places], layers)
        self.low[places] = self.high[places] = reach

    def _depths(self, edges: Any, token: int) -> Floats:
        self.spent += int(edges.nnz)
        return depths(edges, token)

    def bracket(self, lower: float, upper: float) -> Bracket:
        if lower == upper:
            return Bracket.exactly(lower)
        return Bracket(lower, upper, f"between bounds: {self.spent:,} edges searched, more would take too long")


def depths(edges: Any, source: int) -> Floats:
    """Steps from ``source`` along the rows of a csr array to every node; inf if there is no path. **Exact**.

    Example:
        >>> from scipy.sparse import csr_array
        >>> depths(csr_array(np.eye(4, k=1)), 1).tolist()
        [inf, 0.0, 1.0, 2.0]
    """
    from scipy.sparse.csgraph import breadth_first_order

    order, parent = breadth_first_order(edges, source, directed=True, return_predecessors=True)
    above = np.where(parent < 0, np.arange(len(parent)), parent)
    steps = (parent >= 0).astype(np.int64)
    # pointer doubling: after k rounds a pointer spans 2^k steps
    while bool(steps[above[order]].any()):
        steps, above = steps + steps[above], above[above]
    depth_of = np.full(len(parent), np.inf)
    depth_of[order] = steps[order]
    return depth_of
