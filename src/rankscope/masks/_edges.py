"""The keys of each query as index lists or ranges, without a square matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import InputError

EDGE_LIMIT = 1 << 26
"""Maximum number of edges that are listed one by one; this takes about a gigabyte."""

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Edges(Protocol):
    """The keys of each query, listed or still implicit."""

    @property
    def count(self) -> int:
        """Number of edges, or an upper bound on it."""

    def rows(self) -> EdgeRows:
        """The edges one by one."""


@dataclass(frozen=True)
class EdgeRows:
    """The keys of query ``q`` are ``indices[indptr[q]:indptr[q + 1]]``, ascending; ``indptr`` starts at 0."""

    indptr: Ints
    indices: Ints

    @property
    def count(self) -> int:
        """Number of edges."""
        return len(self.indices)

    @property
    def queries(self) -> Ints:
        """The query of each edge."""
        return np.repeat(np.arange(len(self.indptr) - 1, dtype=np.int64), np.diff(self.indptr))

    def rows(self) -> EdgeRows:
        """The rows themselves."""
        return self

    def where(self, chosen: Bools) -> EdgeRows:
        """The edges for which ``chosen`` is True."""
        before = np.concatenate([[0], np.cumsum(chosen, dtype=np.int64)])
        return EdgeRows(before[self.indptr], self.indices[chosen])


@dataclass(frozen=True)
class Progressions:
    """The keys of query ``q`` are ``range(start[q], stop[q])``; counted without listing them."""

    start: Ints
    stop: Ints

    @property
    def lengths(self) -> Ints:
        """Number of keys of each query."""
        lengths: Ints = np.maximum(0, self.stop - self.start)
        return lengths

    @property
    def count(self) -> int:
        """Number of edges."""
        return int(self.lengths.sum())

    def rows(self) -> EdgeRows:
        """The same edges one by one."""
        check_edge_count(self.count)
        indptr = np.concatenate([[0], np.cumsum(self.lengths)])
        indices = np.arange(indptr[-1], dtype=np.int64)
        indices -= np.repeat(indptr[:-1], self.lengths)
        indices += np.repeat(self.start, self.lengths)
        return EdgeRows(indptr, indices)


def clipped(start: Ints | int, stop: Ints | int, keys: int) -> Progressions:
    """One range of keys for each of ``keys`` queries, clipped to the first and the last key."""
    low = np.broadcast_to(np.clip(start, 0, keys), (keys,)).astype(np.int64)
    high = np.broadcast_to(np.clip(stop, 0, keys), (keys,)).astype(np.int64)
    return Progressions(low, high)


def check_edge_count(count: int) -> None:
    """Refuse masks with too many edges for memory."""
    if count > EDGE_LIMIT:
        raise InputError(
            f"This mask has up to {count:,} pairs of query and key at this length, and at most {EDGE_LIMIT:,} are "
            "written out as a sparse matrix. Ask for fewer tokens, or intersect it with a narrower mask, "
            "e.g. 'causal & window(64)'."
        )


def codes(rows: EdgeRows, keys: int) -> Ints:
    """Each edge as ``query * keys + key``, ascending and distinct."""
    return rows.queries * keys + rows.indices


def from_codes(sorted_codes: Ints, keys: int) -> EdgeRows:
    """Rows of ``keys`` queries from ascending codes."""
    queries, indices = np.divmod(sorted_codes, keys)
    lengths = np.bincount(queries, minlength=keys)
    return EdgeRows(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), indices)


def distinct(unsorted: Ints) -> Ints:
    """Sorted and without duplicates; sorting is several times faster here than the hashing in numpy.unique."""
    ascending = np.sort(unsorted)
    new = np.ones(len(ascending), dtype=np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=new[1:])
    return ascending[new]


def united(parts: list[EdgeRows], keys: int) -> EdgeRows:
    """Edges in any of the parts."""
    check_edge_count(sum(part.count for part in parts))
    return from_codes(distinct(np.concatenate([codes(part, keys) for part in parts])), keys)


def contained(rows: EdgeRows, others: EdgeRows, keys: int) -> Bools:
    """For each edge of ``rows``, whether it is in ``others``."""
    wanted, known = codes(rows, keys), codes(others, keys)
    if not len(known):
        return np.zeros(len(wanted), dtype=np.bool_)
    place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    is_known: Bools = known[place] == wanted
    return is_known
