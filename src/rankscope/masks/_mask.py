"""A mask as a value: dense, sparse, as text, as a plain description, and combined with ``|``, ``&``, ``~``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rankscope.errors import InputError
from rankscope.masks._edges import EDGE_LIMIT, Bools, EdgeRows, check_edge_count, united

if TYPE_CHECKING:
    from scipy.sparse import csr_array


DENSE_LIMIT = 1 << 32
"""Maximum number of cells of a dense mask: four gigabytes of booleans."""
SCAN_LIMIT = 1 << 30
"""Maximum number of cells that are scanned, some rows at a time, to list the edges of a mask without structure."""
_CELLS_AT_ONCE = 1 << 22


class Mask(ABC):
    """Which keys a query may see. A frozen value: comparable, hashable, with an expression as its ``str``.

    Positions are aligned at the end: with ``query`` queries and ``key`` keys, query i is at position
    ``key - query + i``, so the newest queries of a cached sequence see what they see in the whole sequence.

    Example:
        >>> from rankscope.masks import parse_mask
        >>> mask = parse_mask("causal & window(1)")
        >>> mask.dense(3).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
        >>> str(mask | parse_mask("sink(1)"))
        'causal & window(1) | sink(1)'
    """

    @property
    @abstractmethod
    def is_causal(self) -> bool:
        """True guarantees that no query sees a later key; False guarantees nothing."""

    @property
    @abstractmethod
    def self_loops(self) -> bool:
        """True guarantees that each query sees its own position; False guarantees nothing."""

    @abstractmethod
    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """The predicate for a column of query positions and the row of all key positions, ``(query, key)``."""

    @abstractmethod
    def most_edges(self, tokens: int) -> int:
        """An upper bound on the number of visible pairs, found without listing them."""

    @abstractmethod
    def rows(self, tokens: int) -> EdgeRows:
        """The keys of each query, listed, without the square matrix if the structure allows it."""

    @abstractmethod
    def among(self, rows: EdgeRows, tokens: int) -> Bools:
        """For each edge of ``rows``, whether this mask has it too."""

    def dense(
        self, query: int, key: int | None = None, device: torch.device | str | None = None, *, allow_empty: bool = False
    ) -> Tensor:
        """True where a query may see a key, shape ``(query, key)``.

        Args:
            query: number of queries.
            key: number of keys; by default as many as queries.
            device: device of the tensor.
            allow_empty: allow queries that see nothing (a softmax over such a row is undefined) instead of raising.

        Raises:
            InputError: a query sees nothing, or the matrix would be too large.
        """
        key = query if key is None else key
        _check_length("query", query)
        _check_length("key", key)
        if query * key > DENSE_LIMIT:
            raise InputError(
                f"The mask '{self}' for {query:,} queries and {key:,} keys has {query * key:,} cells, more than the "
                f"{DENSE_LIMIT:,} of a dense mask. Use sparse(), or fewer queries at a time."
            )
        out = torch.empty(query, key, dtype=torch.bool, device=device)
        for part, seen_there in self._scan(query, key, device):
            out[part] = seen_there
        if not allow_empty and not bool((seen := out.any(1)).all()):
            raise self._sees_nothing(int((~seen).nonzero()[0]), key - query, key)
        return out

    def sparse(self, tokens: int, *, allow_empty: bool = False) -> csr_array:
        """The square matrix as a boolean ``scipy.sparse.csr_array``, with entry (i, j) if i sees j.

        Information flows from j to i. The graph of the theorems, whose edges start at the token that is seen, is the
        transpose.

        Raises:
            InputError: a query sees nothing, or there are too many pairs to list.
        """
        from scipy.sparse import csr_array

        _check_length("tokens", tokens)
        rows = self.rows(tokens)
        empty = np.flatnonzero(np.diff(rows.indptr) == 0)
        if len(empty) and not allow_empty:
            raise self._sees_nothing(int(empty[0]), 0, tokens)
        parts = (np.ones(rows.count, dtype=np.bool_), rows.indices.astype(np.int32), rows.indptr.astype(np.int32))
        return csr_array(parts, shape=(tokens, tokens))

    def __or__(self, other: Mask) -> Mask:
        return either(self, other) if isinstance(other, Mask) else NotImplemented

    def __and__(self, other: Mask) -> Mask:
        return both(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return complement(self)

    def __repr__(self) -> str:
        return f"parse_mask({str(self)!r})"

    def _scan(self, query: int, key: int, device: torch.device | str | None) -> Iterator[tuple[slice, Tensor]]:
        """A few rows of the dense mask at a time, so that int64 positions do not fill the memory."""
        keys = torch.arange(key, device=device).unsqueeze(0)
        height = max(1, _CELLS_AT_ONCE // key)
        for start in range(0, query, height):
            part = slice(start, min(start + height, query))
            positions = torch.arange(part.start, part.stop, device=device).unsqueeze(1) + (key - query)
            yield part, self.sees(positions, keys)

    def _rows_by_scan(self, tokens: int) -> EdgeRows:
        """The edges of a mask without structure, found by testing every pair."""
        if tokens * tokens > SCAN_LIMIT:
            raise InputError(
                f"The edges of '{self}' have no structure to list them by, and looking at every pair of {tokens:,} "
                f"tokens is refused above {SCAN_LIMIT:,} pairs. Intersect it with a narrow mask, e.g. "
                f"'window(64) & ({self})', or ask for fewer tokens."
            )
        lengths, indices, count = [np.zeros(1, dtype=np.int64)], [], 0
        for _, seen in self._scan(tokens, tokens, None):
            count += int(seen.sum())
            check_edge_count(count)
            lengths.append(seen.sum(1).numpy())
            indices.append(seen.nonzero()[:, 1].numpy())
        return EdgeRows(np.cumsum(np.concatenate(lengths)), np.concatenate(indices))

    def _sees_nothing(self, query: int, offset: int, key: int) -> InputError:
        return InputError(
            f"Under the mask '{self}' query {query} (position {query + offset}) sees none of the {key} keys, and "
            "attention over nothing is not defined. Unite the mask with one that gives it a key, e.g. "
            f"'({self}) | window(0)' for the token itself, or pass allow_empty=True."
        )


def _check_length(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise InputError(f"{name} is a number of tokens from 1 to {(1 << 31) - 1:,}, not {value!r}.")


@dataclass(frozen=True, repr=False)
class Either(Mask):
    """The union: keys that any of the parts lets a query see."""

    parts: tuple[Mask, ...]

    @property
    def is_causal(self) -> bool:
        """Whether every part is causal."""
        return all(part.is_causal for part in self.parts)

    @property
    def self_loops(self) -> bool:
        """Whether one part has them."""
        return any(part.self_loops for part in self.parts)

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Any part."""
        return reduce(torch.logical_or, (part.sees(query, key) for part in self.parts))

    def most_edges(self, tokens: int) -> int:
        """The sum over the parts, at most all pairs."""
        return min(tokens * tokens, sum(part.most_edges(tokens) for part in self.parts))

    def rows(self, tokens: int) -> EdgeRows:
        """The merged rows of the parts; tests every pair if they are too many to hold at once."""
        if sum(part.most_edges(tokens) for part in self.parts) > EDGE_LIMIT:
            return self._rows_by_scan(tokens)
        return united([part.rows(tokens) for part in self.parts], tokens)

    def among(self, rows: EdgeRows, tokens: int) -> Bools:
        """Any part."""
        return reduce(np.bitwise_or, (part.among(rows, tokens) for part in self.parts))

    def __str__(self) -> str:
        return " | ".join(str(part) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Both(Mask):
    """The intersection: keys that all of the parts let a query see."""

    parts: tuple[Mask, ...]

    @property
    def is_causal(self) -> bool:
        """Whether one part is causal."""
        return any(part.is_causal for part in self.parts)

    @property
    def self_loops(self) -> bool:
        """Whether every part has them."""
        return all(part.self_loops for part in self.parts)

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Every part."""
        return reduce(torch.logical_and, (part.sees(query, key) for part in self.parts))

    def most_edges(self, tokens: int) -> int:
        """The bound of the narrowest part."""
        return min(part.most_edges(tokens) for part in self.parts)

    def rows(self, tokens: int) -> EdgeRows:
        """The rows of the narrowest part, filtered by the others, so that wide parts are never listed."""
        narrowest = min(self.parts, key=lambda part: part.most_edges(tokens))
        if narrowest.most_edges(tokens) > EDGE_LIMIT:
            return self._rows_by_scan(tokens)
        rows = narrowest.rows(tokens)
        for part in self.parts:
            if part is not narrowest:
                rows = rows.where(part.among(rows, tokens))
        return rows

    def among(self, rows: EdgeRows, tokens: int) -> Bools:
        """Every part."""
        return reduce(np.bitwise_and, (part.among(rows, tokens) for part in self.parts))

    def __str__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Either) else str(part) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Complement(Mask):
    """The complement: keys that the part does not let a query see."""

    part: Mask

    @property
    def is_causal(self) -> bool:
        """Never promised."""
        return False

    @property
    def self_loops(self) -> bool:
        """Never promised."""
        return False

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Where the part does not."""
        return ~self.part.sees(query, key)

    def most_edges(self, tokens: int) -> int:
        """All pairs: an upper bound for the part says nothing about its complement."""
        return tokens * tokens

    def rows(self, tokens: int) -> EdgeRows:
        """Found by testing every pair."""
        return self._rows_by_scan(tokens)

    def among(self, rows: EdgeRows, tokens: int) -> Bools:
        """The edges that the part does not have."""
        return ~self.part.among(rows, tokens)

    def __str__(self) -> str:
        return f"~({self.part})" if isinstance(self.part, (Either, Both)) else f"~{self.part}"


def either(*masks: Mask) -> Mask:
    """The union; nested unions are flattened, so that grouping does not matter."""
    parts = [part for mask in masks for part in (mask.parts if isinstance(mask, Either) else (mask,))]
    return parts[0] if len(parts) == 1 else Either(tuple(parts))


def both(*masks: Mask) -> Mask:
    """The intersection; nested intersections are flattened."""
    parts = [part for mask in masks for part in (mask.parts if isinstance(mask, Both) else (mask,))]
    return parts[0] if len(parts) == 1 else Both(tuple(parts))


def complement(mask: Mask) -> Mask:
    """The complement; the complement of a complement is the mask itself."""
    return mask.part if isinstance(mask, Complement) else Complement(mask)
