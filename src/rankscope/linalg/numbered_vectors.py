r"""Many vectors that arrive in any order, batch by batch or rank by rank, reduced in constant memory.

Few vectors are kept as they are. Of many, the moments about a fixed vector a are kept, and an evenly spaced sample,

.. math:: n, \quad t = \sum_i (x_i - a), \quad M = \sum_i (x_i - a)(x_i - a)^T,

from which the mean is :math:`m = a + t/n` and the centred Gram matrix :math:`S = M - tt^T/n`. With a one of the
vectors, S keeps its digits when all vectors are nearly equal. Every metric that depends only on the singular values of
X, those of CX, and the mean can be read from a small matrix with the same ones: with :math:`S = V\Lambda V^T`,

.. math:: Y = H\Lambda^{1/2}V^T + \sqrt{n/(d+1)}\; 1m^T

of d + 1 rows, where the d columns of H are orthonormal and orthogonal to 1 (Helmert's matrix). Y is X times an isometry
that takes 1 to a multiple of 1.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

MOST_KEPT = 4096
"""Up to this many vectors are kept as they are, if they fit; more have 10^7 pairs, which are too many to go through."""
ALWAYS_KEPT = 256
"""So many are kept however long they are."""
MOST_SAMPLED = 1024


class NumberedVectors:
    """Vectors with the numbers 0 to ``count - 1``.

    What is kept as it is does not depend on order or on the number of processes. The moments are added in the order of
    arrival, and those of several processes in the order of their first numbers, so the last digits may differ.

    Args:
        count: how many there will be.
        most_bytes: memory for everything kept.
        reference: the vector a; by default the first one added. Processes that share the work must use the same.
    """

    def __init__(self, count: int, most_bytes: int, reference: Tensor | None = None) -> None:
        self.count = count
        self._most_bytes = most_bytes
        self._reference = reference
        # Vectors in one array, because many small ones among large buffers that come and go break up the heap.
        self._rows: Float[Tensor, "slots dim"] | None = None
        self._slots: dict[int, int] = {}
        self._wanted: frozenset[int] | None = None
        self._keeps_moments = False
        self._first: int | None = None
        # By the first number that a process added: what another process sends twice replaces itself.
        self._moments: dict[int, _Moments] = {}
        self._added: dict[int, int] = {}

    def add(self, first: int, vectors: Float[Tensor, "rows dim"], present: Sequence[bool] | None = None) -> None:
        """Add the vectors with the numbers ``first``, ``first + 1``, ...; those not ``present`` do not exist."""
        X = vectors.detach().to("cpu", torch.float64)
        rows = [row for row in range(len(X)) if present is None or present[row]]
        if self._first is None:
            self._first = first
            self._plan(X.shape[-1])
        self._added[self._first] = self._added.get(self._first, 0) + len(X)
        self._keep([first + row for row in rows], X[rows])
        if self._keeps_moments and rows:
            if self._reference is None:
                self._reference = X[rows[0]].clone()
            self._moments.setdefault(self._first, _Moments(X.shape[-1])).add(X[rows] - self._reference)

    @property
    def is_complete(self) -> bool:
        """Whether all vectors were added."""
        return sum(self._added.values()) >= self.count

    @property
    def is_exact(self) -> bool:
        """Whether every vector is kept."""
        return self._wanted is None

    @property
    def bytes_held(self) -> int:
        """Memory of what is kept."""
        kept = 0 if self._rows is None else self._rows.numel() * 8
        return kept + sum(moments.bytes_held for moments in self._moments.values())

    def sample(self) -> Float[Tensor, "rows dim"]:
        """The vectors that are kept, in order: all, or an evenly spaced sample."""
        assert self._rows is not None
        return self._rows[[self._slots[number] for number in sorted(self._slots)]]

    def equivalent(self) -> Float[Tensor, "rows dim"] | None:
        """The matrix Y of the module; None if the moments are not kept."""
        if not self._moments:
            return None
        assert self._reference is not None
        total = _Moments(self._reference.numel())
        for first in sorted(self._moments):
            total.merge(self._moments[first])
        return total.equivalent(self._reference)

    def to_json(self) -> dict[str, Any]:
        """Everything, for another process."""
        return {
            "numbers": sorted(self._slots),
            "kept": _packed(self.sample()) if self._slots else None,
            "reference": None if self._reference is None else _packed(self._reference),
            "moments": [[first, moments.to_json()] for first, moments in self._moments.items()],
            "added": [list(entry) for entry in self._added.items()],
        }

    def learn(self, facts: Mapping[str, Any]) -> None:
        """Add the vectors of another process; a second time changes nothing."""
        self._added |= dict(facts["added"])
        if facts["kept"] is not None:
            rows = _unpacked(facts["kept"]).reshape(len(facts["numbers"]), -1)
            self._plan(rows.shape[-1])
            self._keep(facts["numbers"], rows)
        if facts["reference"] is not None:
            self._reference = _unpacked(facts["reference"])
        for first, moments in facts["moments"]:
            self._moments[first] = _Moments.from_json(moments)

    def _keep(self, numbers: Sequence[int], vectors: Tensor) -> None:
        """Store those of the vectors that are wanted; one that is there already is the same."""
        for number, vector in zip(numbers, vectors, strict=True):
            if number in self._slots or not (self._wanted is None or number in self._wanted):
                continue
            if self._rows is None:
                size = self.count if self._wanted is None else len(self._wanted)
                self._rows = torch.empty(size, vectors.shape[-1], dtype=torch.float64)
            self._slots[number] = len(self._slots)
            self._rows[self._slots[number]] = vector

    def _plan(self, dim: int) -> None:
        """Decide what to keep, from the sizes alone, so that every process decides the same."""
        few = self.count <= MOST_KEPT and self.count * dim * 8 <= self._most_bytes
        if few or self.count <= ALWAYS_KEPT:
            return
        size = max(ALWAYS_KEPT, min(MOST_SAMPLED, self._most_bytes // (32 * dim)))
        self._wanted = frozenset(np.linspace(0, self.count - 1, size).round().astype(int).tolist())
        self._keeps_moments = self.count > dim and 32 * dim * dim <= self._most_bytes


class _Moments:
    """Count, sum and second moment of vectors."""

    def __init__(self, dim: int) -> None:
        self._count = 0
        self._sum = torch.zeros(dim, dtype=torch.float64)
        self._second = torch.zeros(dim, dim, dtype=torch.float64)

    @property
    def bytes_held(self) -> int:
        return 8 * (self._sum.numel() + self._second.numel())

    def add(self, X: Float[Tensor, "rows dim"]) -> None:
        self._count += len(X)
        self._sum += X.sum(0)
        self._second.addmm_(X.mT, X)

    def merge(self, other: _Moments) -> None:
        self._count += other._count
        self._sum += other._sum
        self._second += other._second

    def equivalent(self, reference: Float[Tensor, " dim"]) -> Float[Tensor, "rows dim"]:
        n, t, dim = self._count, self._sum, reference.numel()
        S = self._second - torch.outer(t, t) / n
        if not bool(torch.isfinite(S).all()):
            return torch.full((dim + 1, dim), torch.nan, dtype=torch.float64)
        values, V = torch.linalg.eigh((S + S.mT) / 2)
        # Eigenvalues below the rounding of the largest are zeros of S.
        values = values.where(values > dim * torch.finfo(torch.float64).eps * values[-1], 0.0)
        found: Tensor = _helmert(dim) @ (values.sqrt()[:, None] * V.mT)
        return found + math.sqrt(n / (dim + 1)) * (reference + t / n)

    def to_json(self) -> dict[str, Any]:
        return {"count": self._count, "sum": _packed(self._sum), "second": _packed(self._second)}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> _Moments:
        total = _unpacked(facts["sum"])
        found = cls(len(total))
        found._count, found._sum = facts["count"], total
        found._second = _unpacked(facts["second"]).reshape(len(total), -1)
        return found


def _helmert(dim: int) -> Float[Tensor, "rows dim"]:
    """An orthonormal basis of the vectors of ``dim + 1`` entries that are orthogonal to 1, as columns."""
    k = torch.arange(1, dim + 1, dtype=torch.float64)
    size = (k * (k + 1)).rsqrt()
    # Column k holds k times 1, then -k, then zeros, divided by sqrt(k (k + 1)).
    H = torch.triu(size.expand(dim + 1, dim).clone())
    H[1:].diagonal().copy_(-k * size)
    return H


def _packed(X: Tensor) -> str:
    return base64.b64encode(X.numpy().astype("<f8", copy=False).tobytes()).decode()


def _unpacked(packed: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(packed), dtype="<f8").astype(np.float64))
