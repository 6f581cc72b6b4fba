"""Strongly connected components, and the tokens from which all others are reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope._citations import Cite

CITES = (Cite("wu2024role"),)
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Connectivity:
    """The connectivity of the graph of a mask.

    Attributes:
        labels: number of the strongly connected component of each token.
        parts: number of components.
        closed: numbers of the components whose tokens see nothing outside: where information starts.
        centres: the tokens that reach every token, ascending; empty if there are none.
    """

    labels: Ints
    parts: int
    closed: Ints
    centres: Ints

    @property
    def is_strong(self) -> bool:
        """Whether every token reaches every token."""
        return self.parts == 1

    @property
    def is_quasi_strong(self) -> bool:
        """Whether some token reaches every token."""
        return len(self.centres) > 0


def connectivity(sees: Any) -> Connectivity:
    """Strongly connected components and centre nodes of a mask, by Tarjan's algorithm. **Exact**.

    Information flows from j to i if i sees j. A component that sees nothing outside receives no information from
    outside. With two of them, no token reaches all; with one, its tokens are the centres.

    Args:
        sees: scipy sparse matrix, entry (i, j) when i sees j.

    Example:
        >>> from scipy.sparse import csr_array
        >>> found = connectivity(csr_array(np.tril(np.ones((4, 4)))))
        >>> found.parts, found.centres.tolist(), found.is_strong, found.is_quasi_strong
        (4, [0], False, True)
    """
    from scipy.sparse.csgraph import connected_components

    parts, labels = connected_components(sees, directed=True, connection="strong")
    return _described(int(parts), labels.astype(np.int64), sees)


def _described(parts: int, labels: Ints, sees: Any) -> Connectivity:
    queries = np.repeat(np.arange(sees.shape[0]), np.diff(sees.indptr))
    leaves = labels[queries] != labels[sees.indices]
    is_closed = np.ones(parts, dtype=np.bool_)
    is_closed[labels[queries[leaves]]] = False
    closed = np.flatnonzero(is_closed)
    centres = np.flatnonzero(labels == closed[0]) if len(closed) == 1 else np.empty(0, dtype=np.int64)
    return Connectivity(labels, parts, closed, centres)
