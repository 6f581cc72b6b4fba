"""Eccentricities of many tokens at once, one bit for each: exact where searches one by one would take too long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORDS_AT_ONCE = 1 << 22
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Words = NDArray[np.uint64]


def reach_of_many(sees: Any, sources: Ints, most_layers: int) -> Floats:
    """For each source the layers after which every token holds something of it; inf where ``most_layers`` are too few.

    **Exact.** One bit per source and token; a layer unites the bits of all tokens that a token sees.

    Args:
        sees: scipy csr array, entry (i, j) when i sees j; no row is empty.
        sources: tokens to start from.
        most_layers: after how many layers to stop.

    Example:
        >>> from scipy.sparse import csr_array
        >>> line = csr_array(np.eye(4) + np.eye(4, k=1) + np.eye(4, k=-1))
        >>> reach_of_many(line, np.arange(4), 9).tolist()
        [3.0, 2.0, 2.0, 3.0]
    """
    found = np.full(len(sources), np.inf)
    width = max(1, _WORDS_AT_ONCE // sees.shape[0]) * 64
    for first in range(0, len(sources), width):
        part = slice(first, first + width)
        found[part] = _reach(sees, sources[part], most_layers)
    return found


@dataclass(frozen=True, eq=False)
class _Rows:
    """A dense pattern row by row, as a csr array holds it."""

    indptr: Ints
    indices: Ints
    shape: tuple[int, int]


def reach_of_all(edges: NDArray[np.bool_]) -> Floats:
    """For each token of a small dense pattern the layers after which every token holds something of it. **Exact**.

    Args:
        edges: True at (i, j) when i sees j. What a token holds it keeps, whether it sees itself or not.

    Example:
        >>> reach_of_all(np.tril(np.ones((3, 3), dtype=bool))).tolist()
        [1.0, inf, inf]
    """
    n = len(edges)
    rows, columns = np.nonzero(edges | np.eye(n, dtype=np.bool_))
    starts = np.searchsorted(rows, np.arange(n + 1))
    return reach_of_many(_Rows(starts, columns, (n, n)), np.arange(n), n - 1)


def _reach(sees: Any, sources: Ints, most_layers: int) -> Floats:
    number = np.arange(len(sources))
    held = np.zeros((sees.shape[0], (len(sources) + 63) // 64), dtype=np.uint64)
    np.bitwise_or.at(held, (sources, number // 64), np.uint64(1) << (number % 64).astype(np.uint64))
    found = np.full(len(sources), np.inf)
    for layer in range(most_layers + 1):
        everywhere = np.bitwise_and.reduce(held, axis=0)
        full = (everywhere[number // 64] >> (number % 64).astype(np.uint64)) & np.uint64(1)
        found[(full == 1) & np.isinf(found)] = layer
        if layer == most_layers or not np.isinf(found).any():
            break
        wider = held | _seen_by(sees, held)
        if np.array_equal(wider, held):
            break
        held = wider
    return found


def _seen_by(sees: Any, held: Words) -> Words:
    """For each token the union over what it sees, some rows at a time so that the gathered rows stay small."""
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
