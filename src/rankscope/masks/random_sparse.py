"""A token sees itself and some others by chance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankscope._citations import Cite
from rankscope.errors import InputError
from rankscope.masks._edges import EdgeRows, Ints, check_edge_count, from_codes
from rankscope.masks._spec import Parameter, mask

_GOLDEN = 0x9E3779B97F4A7C15
MOST_DRAWS = 1024


@dataclass(frozen=True)
class _Draws:
    """The edges of ``tokens`` queries, drawn when they are listed."""

    tokens: int
    degree: int
    seed: int

    @property
    def count(self) -> int:
        return self.tokens * min(self.degree + 1, self.tokens)

    def rows(self) -> EdgeRows:
        check_edge_count(self.count)
        position = np.arange(self.tokens, dtype=np.int64)
        seen = np.concatenate([position[:, None], drawn_keys(position, self.tokens, self.degree, self.seed)], axis=1)
        return from_codes(np.sort((position[:, None] * self.tokens + seen).ravel()), self.tokens)


@mask(
    parameters=(
        Parameter("degree", "keys drawn for each query, besides itself", maximum=MOST_DRAWS),
        Parameter("seed", "another seed, another graph", default=0),
    ),
    edges=_Draws,
    example="random_sparse(degree=2, seed=0)",
    is_causal=False,
    self_loops=True,
    pointwise=False,
    cites=(Cite("zaheer2020bigbird"),),
)
def random_sparse(query: Tensor, key: Tensor, degree: int, seed: int) -> Tensor:
    """A query sees itself and ``degree`` other keys, drawn uniformly without replacement.

    A row depends only on the seed, the query's position and the number of keys: it does not depend on which
    other rows are requested, in what order, or on any generator's state. With ``degree`` or fewer other keys, all.

    Example:
        >>> import torch
        >>> random_sparse(torch.arange(9).unsqueeze(1), torch.arange(9).unsqueeze(0), degree=2, seed=0).sum(1).tolist()
        [3, 3, 3, 3, 3, 3, 3, 3, 3]
    """
    keys = key.shape[-1]
    position = query.reshape(-1).cpu().numpy()
    drawn = torch.from_numpy(drawn_keys(position, keys, degree, seed)).to(key.device)
    return (query == key).scatter(1, drawn, True)


def drawn_keys(position: Ints, keys: int, degree: int, seed: int) -> Ints:
    """``(query, degree)`` distinct keys other than the query's own position.

    Floyd's sampling from 0..keys-2: step j draws from 0..j, and uses j itself if the drawn key is already taken;
    numbers from the query's own position on are then incremented by one.
    """
    if len(position) and position.min() < 0:
        raise InputError(
            "random_sparse draws for queries that have a position among the keys, and with more queries than keys the "
            f"first stands at {position.min()}. Use it where there are at least as many keys as queries."
        )
    size = min(degree, keys - 1)
    rows = np.tile(np.arange(size, dtype=np.int64), (len(position), 1))
    stream = _mixed(_mixed(np.full(len(position), seed, dtype=np.uint64)) ^ position.astype(np.uint64))
    for place in range(size if size < keys - 1 else 0):
        top = keys - 1 - size + place
        # 64 random bits modulo top + 1: the bias is less than keys / 2^64.
        choice = (_mixed(stream + _steps(place)) % np.uint64(top + 1)).astype(np.int64)
        taken = (rows[:, :place] == choice[:, None]).any(1)
        rows[:, place] = np.where(taken, top, choice)
    return rows + (rows >= position[:, None])


def _steps(place: int) -> np.uint64:
    return np.uint64((place + 1) * _GOLDEN % (1 << 64))


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijective mixing of 64 bits (the finaliser of splitmix64); arrays of unsigned integers wrap around."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
