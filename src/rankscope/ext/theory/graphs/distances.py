r"""Radius and diameter of a large sparse graph: exact by bounds on all eccentricities at once, or a bracket.

One search forward and one backward from a token bound the eccentricity of every other one,
:math:`e(x) \ge e(s) - d(s, x)`, :math:`e(x) \ge d(x, v)` and :math:`e(x) \le d(x, s) + e(s)`, and the next search
starts where the bounds are widest. What is still open at the end is searched from each token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import breadth_first_order

from rankscope._citations import Cite
from rankscope.ext.theory.graphs.bracket import Bracket
from rankscope.ext.theory.graphs.connectivity import Connectivity

CITES = (Cite("borassi2015fast"), Cite("wu2024role"))
EDGES_BUDGET = 1 << 28
"""Total number of edges that the searches may visit; takes some seconds."""
PAIRS_BUDGET = 1 << 29
"""Pairs of an edge and a source that a search from each of several sources may process; takes some seconds."""
NO_CENTRE = "infinite: no token reaches all others"
NOT_STRONG = "infinite: some token is not reached by some other"
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


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
    not_strong = Bracket.exactly(float("inf"), NOT_STRONG)
    if not how.is_quasi_strong:
        return Bracket.exactly(float("inf"), NO_CENTRE), not_strong
    low, high, spent = eccentricity_bounds(sees, how.centres, largest=how.is_strong)
    radius = _bracket(float(low.min()), float(high.min()), spent)
    diameter = _bracket(float(low.max()), float(high.max()), spent) if how.is_strong else not_strong
    return radius, diameter


def _bracket(lower: float, upper: float, spent: int) -> Bracket:
    if lower == upper:
        return Bracket.exactly(lower)
    return Bracket(lower, upper, f"between bounds: {spent:,} edges searched, more would take too long")


def eccentricity_bounds(sees: Any, centres: Ints, *, largest: bool) -> tuple[Floats, Floats, int]:
    """Lower and upper bounds on the eccentricity of each centre, and the number of edges searched. **Bounds**.

    Searches stop as soon as the smallest eccentricity is known and, with ``largest``, the largest.

    Args:
        sees: scipy csr array, entry (i, j) when i sees j.
        centres: tokens that reach every token.
        largest: whether the largest eccentricity is wanted too.
    """
    seen = sees.T.tocsr()
    low, high = np.zeros(len(centres)), np.full(len(centres), float(sees.shape[0] - 1))
    nothing = np.empty(0, dtype=np.int64)
    spent, turn = 0, 0
    # the first search starts at the token that is seen by most
    place = int(np.diff(seen.indptr)[centres].argmax())
    while True:
        open_small = np.flatnonzero((low < high.min()) & (low < high))
        open_large = np.flatnonzero((high > low.max()) & (low < high)) if largest else nothing
        if turn:
            # for the radius and the diameter in turn: the token with the most promising bounds
            if len(open_small) and (turn % 2 == 0 or not len(open_large)):
                place = int(open_small[np.lexsort((high[open_small], low[open_small]))[0]])
            elif len(open_large):
                place = int(open_large[np.lexsort((-low[open_large], -high[open_large]))[0]])
            else:
                return low, high, spent
        if spent + 3 * sees.nnz > EDGES_BUDGET:
            break
        token = int(centres[place])
        out = depths(seen, token)
        farthest = float(out.max())
        low[place] = high[place] = farthest
        low = np.maximum(low, farthest - out[centres])
        high = np.minimum(high, depths(sees, token)[centres] + farthest)
        low = np.maximum(low, depths(sees, int(out.argmax()))[centres])
        spent, turn = spent + 3 * sees.nnz, turn + 1
    places = np.union1d(open_small, open_large)
    if sees.nnz * len(places) <= PAIRS_BUDGET:
        low[places] = high[places] = [depths(seen, int(token)).max() for token in centres[places]]
    return low, high, spent


def depths(edges: Any, source: int) -> Floats:
    """Steps from ``source`` along the rows of a csr array to every node; inf if there is no path. **Exact**.

    Example:
        >>> from scipy.sparse import csr_array
        >>> depths(csr_array(np.eye(4, k=1)), 1).tolist()
        [inf, 0.0, 1.0, 2.0]
    """
    order, parent = breadth_first_order(edges, source, directed=True, return_predecessors=True)
    above = np.where(parent < 0, np.arange(len(parent)), parent)
    steps = (parent >= 0).astype(np.int64)
    # pointer doubling: after k rounds a pointer spans 2^k steps
    while bool(steps[above[order]].any()):
        steps, above = steps + steps[above], above[above]
    depth_of = np.full(len(parent), np.inf)
    depth_of[order] = steps[order]
    return depth_of
