"""Many vectors that arrive in any order, batch by batch or rank by rank, in bounded memory.

All are stored if they are few; of more, an evenly spaced sample. What is stored depends only on the number and the size
of the vectors, not on their order or on the number of processes.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

LARGEST_STORED = 4096
"""At most this many vectors are stored, if they fit; more have 10^7 pairs, which are too many to go through."""
ALWAYS_STORED = 256
"""So many are stored however long they are."""


class NumberedVectors:
    """Vectors with the numbers 0 to ``count - 1``.

    Args:
        count: how many there will be.
        most_bytes: memory for everything stored.
    """

    def __init__(self, count: int, most_bytes: int) -> None:
        self.count = count
        self._most_bytes = most_bytes
        # Vectors in one array, because many small ones among large buffers that come and go break up the heap.
        self._rows: Float[Tensor, "slots dim"] | None = None
        self._slots: dict[int, int] = {}
        self._wanted: frozenset[int] | None = None
        # By the first number that a process added: what another process sends twice replaces itself.
        self._first: int | None = None
        self._added: dict[int, int] = {}

    def add(self, first: int, vectors: Float[Tensor, "rows dim"], present: Sequence[bool] | None = None) -> None:
        """Add the vectors with the numbers ``first``, ``first + 1``, ...; those not ``present`` do not exist."""
        X = vectors.detach().to("cpu", torch.float64)
        self._first = first if self._first is None else self._first
        self._added[self._first] = self._added.get(self._first, 0) + len(X)
        rows = [row for row in range(len(X)) if present is None or present[row]]
        self._keep([first + row for row in rows], X[rows])

    @property
    def is_complete(self) -> bool:
        """Whether all vectors were added."""
        return sum(self._added.values()) >= self.count

    @property
    def is_exact(self) -> bool:
        """Whether every vector is stored."""
        return self._wanted is None

    def sample(self) -> Float[Tensor, "rows dim"]:
        """The stored vectors, in order: all, or an evenly spaced sample."""
        assert self._rows is not None
        return self._rows[[self._slots[number] for number in sorted(self._slots)]]

    def to_json(self) -> dict[str, Any]:
        """Everything, for another process."""
        return {
            "numbers": sorted(self._slots),
            "kept": base64.b64encode(self.sample().numpy().astype("<f8").tobytes()).decode() if self._slots else None,
            "added": [list(entry) for entry in self._added.items()],
        }

    def learn(self, facts: Mapping[str, Any]) -> None:
        """Add the vectors of another process; a second time changes nothing."""
        self._added |= dict(facts["added"])
        if facts["kept"] is not None:
            rows = np.frombuffer(base64.b64decode(facts["kept"]), dtype="<f8").astype(np.float64)
            self._keep(facts["numbers"], torch.from_numpy(rows).reshape(len(facts["numbers"]), -1))

    def _keep(self, numbers: Sequence[int], vectors: Tensor) -> None:
        """Store those of the vectors that are wanted; one that is there already is the same."""
        if self._rows is None:
            dim = vectors.shape[-1]
            most = max(ALWAYS_STORED, min(LARGEST_STORED, self._most_bytes // (8 * dim)))
            if self.count > most:
                self._wanted = frozenset(np.linspace(0, self.count - 1, most).round().astype(int).tolist())
            self._rows = torch.empty(min(self.count, most), dim, dtype=torch.float64)
        for number, vector in zip(numbers, vectors, strict=True):
            if number not in self._slots and (self._wanted is None or number in self._wanted):
                self._slots[number] = len(self._slots)
                self._rows[self._slots[number]] = vector
