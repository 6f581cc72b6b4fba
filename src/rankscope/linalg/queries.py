"""The queries and keys of attention, one matrix of each per head and sequence."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg.tokens import Tokens


class Queries:
    """Queries and keys as they enter attention, after rotary positions and norms, before the scale.

    Args:
        query: ``(*batch, heads, query, dim)``.
        key: ``(*batch, key_heads, key, dim)``; each key head serves as many query heads in a row.
        keep: which tokens count, ``(*batch, query)``; of the keys too, if there are as many.

    Attributes:
        query: the queries, with the reductions of tokens.
        key: the keys that each query head reads, likewise.

    Raises:
        InputError: the shapes do not fit.
    """

    def __init__(
        self,
        query: Float[Tensor, "*batch heads query dim"],
        key: Float[Tensor, "*batch key_heads key dim"],
        keep: Bool[Tensor, "*batch query"] | None = None,
    ) -> None:
        fits = query.ndim >= 3 and query.ndim == key.ndim and query.shape[-1] == key.shape[-1]
        if not fits or query.shape[:-3] != key.shape[:-3] or query.shape[-3] % max(1, key.shape[-3]):
            raise InputError(
                f"Queries were given with shape {tuple(query.shape)} and keys with shape {tuple(key.shape)}. Expected "
                "(*batch, heads, tokens, dim), with a number of heads that is a multiple of that of the keys."
            )
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        valid = None if keep is None else keep.unsqueeze(-2).expand(query.shape[:-1])
        self.query = Tokens(query, valid)
        self.key = Tokens(key, valid if key.shape[-2] == query.shape[-2] else None)
        self.batch_shape, self.fewest = self.query.batch_shape, self.query.fewest

    @property
    def count(self) -> Float[Tensor, " matrices"]:
        """Number of queries that count."""
        return self.query.count

    @property
    def finite(self) -> Bool[Tensor, " matrices"]:
        """Whether every entry that counts is a finite number."""
        return self.query.finite & self.key.finite
