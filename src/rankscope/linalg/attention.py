"""The attention matrices of a batch, and the float64 reductions that attention metrics are computed from."""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg.attention_view import AttentionSums, AttentionView
from rankscope.linalg.joining import Joinable, Made
from rankscope.linalg.tokens import TokenPiece, Tokens, add_columns, join_rows, walk

_TINY = torch.finfo(torch.float64).tiny


class AttentionMatrix(AttentionView, Joinable):
    """Attention probabilities P of shape ``(*batch, heads, query, key)``, one matrix per head and sequence.

    Reductions are in float64, on the device of ``probs``, computed piece by piece on first use and cached; sums are in
    units of ``rows.scale``.

    Args:
        probs: probabilities returned by the softmax, any floating dtype.
        support: which keys each row may see (mask and padding), broadcastable to the shape of ``probs``; by default all
            of them. It cannot be inferred from zero probabilities, which may have underflowed.
        keep: which query rows count, ``(*batch, query)``; rows of padding tokens do not.

    Raises:
        InputError: ``probs`` has fewer than three axes or is not floating, or ``support`` or ``keep`` does not fit it.
    """

    def __init__(
        self,
        probs: Float[Tensor, "*batch heads query key"],
        support: Bool[Tensor, ...] | None = None,
        keep: Bool[Tensor, "*batch query"] | None = None,
    ) -> None:
        if not probs.is_floating_point() or probs.ndim < 3:
            raise InputError(
                f"Attention was given as a {probs.dtype} tensor of shape {tuple(probs.shape)}. Expected probabilities "
                "of shape (*batch, heads, query, key)."
            )
        self.batch_shape = tuple(probs.shape[:-2])
        self.keys = probs.shape[-1]
        expected = (*probs.shape[:-3], probs.shape[-2])
        if keep is not None and (keep.dtype != torch.bool or tuple(keep.shape) != expected):
            raise InputError(
                f"keep is a {keep.dtype} tensor of shape {tuple(keep.shape)}. Expected booleans of shape {expected}, "
                "one per query: pass attention_mask.bool()."
            )
        per_head = None if keep is None else keep.unsqueeze(-2).expand(probs.shape[:-1])
        self.rows = Tokens(probs, per_head)
        self._support = None if support is None else self._fitting(support, probs)
        self.made = Made(AttentionMatrix, (probs, self._support_by_sequence(), keep))

    @cached_property
    def valid(self) -> Bool[Tensor, "matrices query"]:
        """Which rows count."""
        return self.rows.valid

    @cached_property
    def support_size(self) -> Float[Tensor, "matrices query"]:
        """Number of keys each row may see."""
        if self._support is None:
            return self.rows.zeros(self.rows.tokens) + float(self.keys)
        return self._per_row(self._support.sum(-1).double())

    @cached_property
    def sees_first(self) -> Bool[Tensor, "matrices query"]:
        """Whether a row may see the first key."""
        if self._support is None:
            return torch.ones_like(self.valid)
        return self._per_row(self._support.gather(-1, self._first_of_support).squeeze(-1))

    @cached_property
    def sums(self) -> AttentionSums:
        """Mass, p log p and squares, from one walk over P."""
        parts = [_sums_of_piece(piece) for piece in walk(self.rows)]
        return AttentionSums(
            mass=join_rows(self.rows, [part.mass for part in parts]),
            p_log_p=join_rows(self.rows, [part.p_log_p for part in parts]),
            energy=add_columns(self.rows, [part.energy for part in parts]),
            centred_energy=add_columns(self.rows, [part.centred_energy for part in parts]),
        )

    @cached_property
    def first_mass(self) -> Float[Tensor, "matrices query"]:
        """Probability that each row gives to the first key."""
        return self.rows.entries(self._first_key)

    @cached_property
    def sees_itself(self) -> Bool[Tensor, "matrices query"]:
        """Whether a row may see the key at its own position."""
        if self.rows.tokens != self.keys:
            return torch.zeros_like(self.valid)
        if self._support is None:
            return torch.ones_like(self.valid)
        square = self._support.expand(*self._support.shape[:-2], self.keys, self.keys)
        return self._per_row(square.diagonal(dim1=-2, dim2=-1))

    @cached_property
    def own_mass(self) -> Float[Tensor, "matrices query"]:
        """Probability that each row gives to the key at its own position."""
        if self.rows.tokens != self.keys:
            return self.rows.zeros(self.rows.tokens)
        return self.rows.entries(torch.arange(self.keys, device=self.rows.device).expand_as(self.valid))

    @property
    def count(self) -> Float[Tensor, " matrices"]:
        """Number of query rows that count."""
        return self.rows.count

    @property
    def fewest(self) -> int:
        """Lower bound on the number of rows that count in any matrix."""
        return self.rows.fewest

    @cached_property
    def largest_centred_singular_value(self) -> Float[Tensor, " matrices"]:
        """Largest singular value of CP; NaN for P = 0."""
        largest = self.rows.centred_singular_values[:, 0] * self.rows.scale
        return largest.masked_fill(~(self.rows.energies.row.sum(-1) > 0), torch.nan)

    @property
    def keeps_bits(self) -> bool:
        """Whether bits on a CPU depend neither on the number of threads nor on what the view is joined with."""
        return self.rows.keeps_bits

    def _support_by_sequence(self) -> Tensor | None:
        """The support with an entry per sequence, to be joined."""
        if self._support is None:
            return None
        return self._support.expand(self.batch_shape[0], *self._support.shape[1:])

    def _fitting(self, support: Tensor, probs: Tensor) -> Tensor:
        padded = (1,) * (probs.ndim - support.ndim) + tuple(support.shape)
        if support.dtype != torch.bool or any(s not in (1, p) for s, p in zip(padded, probs.shape, strict=True)):
            raise InputError(
                f"support is a {support.dtype} tensor of shape {tuple(support.shape)}. Expected booleans that "
                f"broadcast to {tuple(probs.shape)}: True where a query may see a key."
            )
        return support.detach().to(self.rows.device).reshape(padded).expand(*padded[:-1], self.keys)

    @cached_property
    def _first_of_support(self) -> Tensor:
        """The first key that any row may see (padding may be on the left), repeated for each row of the support."""
        assert self._support is not None
        first = self._support.any(-2, keepdim=True).to(torch.uint8).argmax(-1, keepdim=True)
        return first.expand(*self._support.shape[:-1], 1)

    @cached_property
    def _first_key(self) -> Tensor:
        if self._support is None:
            return torch.zeros_like(self.valid, dtype=torch.int64)
        return self._per_row(self._first_of_support.squeeze(-1))

    def _per_row(self, value: Tensor) -> Tensor:
        shape = (*self.batch_shape, self.rows.tokens)
        return value.expand(shape).reshape(self.rows.sequences, self.rows.tokens)


def _sums_of_piece(piece: TokenPiece) -> AttentionSums:
    P = piece.X
    # 0 at p = 0, and NaN for a negative entry: a row of it is not a distribution, and has no entropy.
    if piece.mean.tail is None:
        # Four times as fast as xlogy. Narrow formats have no number so small that the addition would change it.
        p_log_p = torch.add(P, _TINY, out=piece.spare).log_().mul_(P).sum(-1)
    else:
        p_log_p = torch.special.xlogy(P, P, out=piece.spare).sum(-1)
    mass, energy = P.sum(-1), torch.linalg.vector_norm(P, dim=(-2, -1)).square_()
    return AttentionSums(mass, p_log_p, energy, torch.linalg.vector_norm(piece.centre_(), dim=(-2, -1)).square_())
