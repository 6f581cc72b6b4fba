"""The largest attention score of each row: scores as they enter the softmax, after scale, soft cap, bias and mask."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg.joining import Joinable, Made
from rankscope.linalg.precision import float64_home
from rankscope.linalg.score_strips import HIDES, HeadScores, keys_of, largest_scores, parts


class AttentionScores(Joinable):
    """Scores ``(*batch, heads, query, key)``, one matrix per head and sequence; hidden keys are -inf or very negative.

    Args:
        scores: the scores, or only the largest of each row as ``(*batch, heads, query, 1)``.
        keep: which query rows count, ``(*batch, query)``.

    Raises:
        InputError: ``scores`` has fewer than three axes or is not floating, or ``keep`` does not fit it.
    """

    def __init__(
        self, scores: Float[Tensor, "*batch heads query key"], keep: Bool[Tensor, "*batch query"] | None = None
    ) -> None:
        if not scores.is_floating_point() or scores.ndim < 3 or scores.shape[-1] == 0:
            raise InputError(
                f"Attention scores were given as a {scores.dtype} tensor of shape {tuple(scores.shape)}. Expected "
                "(*batch, heads, query, key), as they enter the softmax."
            )
        expected = (*scores.shape[:-3], scores.shape[-2])
        if keep is not None and (keep.dtype != torch.bool or tuple(keep.shape) != expected):
            raise InputError(
                f"keep is a {keep.dtype} tensor of shape {tuple(keep.shape)}. Expected booleans of shape {expected}, "
                "one per query: pass attention_mask.bool()."
            )
        self.batch_shape = tuple(scores.shape[:-2])
        self.fewest = scores.shape[-2] if keep is None else 0
        rows = scores.detach().amax(-1)
        every = torch.ones_like(rows, dtype=torch.bool)
        valid = every if keep is None else keep.unsqueeze(-2).expand_as(every).to(rows.device)
        home, matrices = float64_home(rows), math.prod(self.batch_shape)
        self._rows = rows.to(home).double().reshape(matrices, -1)
        self._valid = valid.to(home).reshape(matrices, -1)
        self.made = Made(AttentionScores, (rows.unsqueeze(-1), keep))

    @cached_property
    def count(self) -> Float[Tensor, " matrices"]:
        """Number of query rows that count."""
        return self._valid.sum(-1).double()

    @cached_property
    def finite(self) -> Bool[Tensor, " matrices"]:
        """Whether no row that counts holds NaN or plus infinity; minus infinity hides a key."""
        lost = self._rows.isnan() | (self._rows == torch.inf)
        return ~(lost & self._valid).any(-1)

    @cached_property
    def largest(self) -> Float[Tensor, " matrices"]:
        """The largest score of the rows that count; NaN if they see no key."""
        seen = self._valid & ~(self._rows <= HIDES)
        if self._rows.shape[-1] == 0:
            return self._rows.sum(-1) * math.nan
        return torch.where(seen.any(-1), self._rows.masked_fill(~seen, -torch.inf).amax(-1), math.nan)


def blockwise_scores(
    query: Float[Tensor, "batch heads query dim"],
    key: Float[Tensor, "batch key_heads key dim"],
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Float[Tensor, "batch heads query 1"]:
    """The largest score of each row of a fused call, a few rows at a time, without a query by key matrix."""
    batch, heads, tokens, dim = query.shape
    if mask is not None:
        mask = mask.expand(batch, heads, tokens, key.shape[2])
    found = [
        largest_scores(
            HeadScores.of(
                query[part].flatten(0, 1),
                keys_of(part, key, heads // key.shape[1]),
                1 / math.sqrt(dim) if scale is None else scale,
                range(tokens),
                causal=is_causal,
                mask=None if mask is None else mask[part].flatten(0, 1),
            )
        )
        for part in parts(query, key, [range(tokens)] * batch)
    ]
    return torch.cat(found).reshape(batch, heads, tokens, 1)
