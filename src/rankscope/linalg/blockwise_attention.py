r"""Attention on long sequences: the reductions of every attention metric, without a query by key matrix.

One walk over strips of rows yields all sums. Everything is computed
for :math:`D = P - 1r^T` with a reference row r near the mean row: CP = CD, and sums of squares of D
do not cancel when rows are nearly equal, as those of P would. A row is divided by its sum as rounded to the dtype of
the strip, which makes it :math:`\tilde P = \mathrm{diag}(m)P` with masses m that differ from 1 by that rounding. The
small results are corrected for it:

.. math:: D = \mathrm{diag}(1/m)\tilde D - e r^T, \qquad \tilde D = \tilde P - 1r^T, \quad e = 1 - 1/m .

A walk starts with a row near the mean row, from a sample of rows, each weighted by the number of rows it represents.
Half of them are evenly spaced; the other half are denser towards the beginning, where rows of a causal mask are short,
large and different from each other. A poor sample costs digits near collapse, but never correctness.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankscope.errors import InputError, UnsupportedOperationError
from rankscope.linalg.attention_view import AttentionSums, AttentionView
from rankscope.linalg.precision import float64_home, may_hold
from rankscope.linalg.score_strips import HIDES, HeadScores, Part, keys_of, parts

_STRIP_ENTRIES = 1 << 22


class SupportRows:
    """Mask and causal order together.

    Args:
        shape: ``(batch, heads, query, key)``.
        device: device of the results.
        mask: broadcastable to ``shape``; True where a key is visible, or an additive mask.
        is_causal: a row sees keys up to its own position.

    Raises:
        InputError: a mask that does not broadcast.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], device: torch.device, mask: Tensor | None, *, is_causal: bool
    ) -> None:
        self._shape, self._device, self.is_causal = shape, device, is_causal
        self._mask: Tensor | None = None
        if mask is not None:
            padded = (1,) * (4 - mask.ndim) + tuple(mask.shape)
            if len(padded) != 4 or any(m not in (1, s) for m, s in zip(padded, shape, strict=True)):
                raise InputError(
                    f"The attention mask has the shape {tuple(mask.shape)}. Expected one that broadcasts to {shape}."
                )
            # Batch and head axes are not expanded: a mask that they share is counted once.
            self._mask = mask.reshape(padded).expand(*padded[:2], *shape[2:])

    def mask_of(self, part: Part) -> Tensor | None:
        """The mask of a few matrices, ``(matrices, query, key)``; of a single one it is a view."""
        return None if self._mask is None else self._mask.expand(self._shape)[part].flatten(0, 1)

    @cached_property
    def size(self) -> Float[Tensor, "matrices query"]:
        """Number of keys each row may see."""
        if self._mask is None:
            every = torch.full((self._shape[2],), self._shape[3], dtype=torch.float64, device=self._device)
            if self.is_causal:
                place = torch.arange(1.0, self._shape[2] + 1, dtype=torch.float64, device=self._device)
                every = torch.minimum(every, place)
            return self._by_matrix(every.expand(1, 1, -1))
        return self._by_matrix(torch.cat([seen.sum(-1) for seen in self._strips()], -1).double())

    @cached_property
    def first_key(self) -> Int[Tensor, "batch heads"]:
        """The first key that any row may see, which is not key 0 if padding is on the left."""
        if self._mask is None:
            return torch.zeros(self._shape[:2], dtype=torch.int64, device=self._device)
        seen = torch.zeros(*self._mask.shape[:2], self._shape[3], dtype=torch.bool, device=self._device)
        for strip in self._strips():
            seen |= strip.any(-2)
        return seen.to(torch.uint8).argmax(-1).expand(self._shape[:2])

    @cached_property
    def sees_first(self) -> Bool[Tensor, "matrices query"]:
        """Whether a row may see the first key."""
        if self._mask is None:
            return torch.ones(self._shape[0] * self._shape[1], self._shape[2], dtype=torch.bool, device=self._device)
        first = self.first_key[: self._mask.shape[0], : self._mask.shape[1], None, None]
        column = self._mask.gather(-1, first.expand(-1, -1, self._shape[2], 1)).squeeze(-1)
        seen = _visible(column)
        if self.is_causal:
            seen &= torch.arange(self._shape[2], device=self._device) >= first.squeeze(-1)
        return self._by_matrix(seen)

    @cached_property
    def sees_itself(self) -> Bool[Tensor, "matrices query"]:
        """Whether a row may see the key at its own position."""
        queries, keys = self._shape[2:]
        seen = torch.full((1, 1, queries), queries == keys, dtype=torch.bool, device=self._device)
        if self._mask is not None and queries == keys:
            seen = _visible(self._mask.diagonal(dim1=-2, dim2=-1))
        return self._by_matrix(seen)

    def _strips(self) -> Iterator[Bool[Tensor, "batch heads strip key"]]:
        assert self._mask is not None
        batch, heads, queries, keys = self._mask.shape
        height = max(1, _STRIP_ENTRIES // max(1, batch * heads * keys))
        for start in range(0, queries, height):
            seen = _visible(self._mask[:, :, start : start + height])
            if self.is_causal:
                place = torch.arange(start, start + seen.shape[2], device=self._device)
                seen = seen & (torch.arange(keys, device=self._device) <= place.unsqueeze(-1))
            yield seen

    def _by_matrix(self, value: Tensor) -> Tensor:
        return value.expand(*self._shape[:3]).flatten(0, 1)


def _visible(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > HIDES


_ROWS_FOR_MEAN = 32
_NEAR_EQUAL = 0.3
"""Relative deviation of the rows above which sums of squares are accurate enough without a reference row."""


def reference_row(scores: HeadScores) -> Float[Tensor, "heads keys"]:
    """A row near the mean row of each head, from a sample; zero where the rows are not nearly equal."""
    if scores.rows == 0:
        return torch.zeros(scores.heads, scores.keys, dtype=torch.float64, device=scores.query.device)
    numbers, weights = _some_rows(scores.rows, _ROWS_FOR_MEAN)
    weights = weights.to(scores.query.device, non_blocking=True)
    P = _probabilities(scores, numbers)
    mean = ((weights / weights.sum()).to(P) @ P).double()
    energy = _weighted_squares(P, weights)
    D = P.sub_(mean.to(P).unsqueeze(-2))
    is_near_equal = _weighted_squares(D, weights) <= _NEAR_EQUAL**2 * energy
    return mean.masked_fill(~is_near_equal.unsqueeze(-1), 0.0)


def _weighted_squares(
    rows: Float[Tensor, "heads some keys"], weights: Float[Tensor, " some"]
) -> Float[Tensor, " heads"]:
    squares: Tensor = torch.linalg.vector_norm(rows, dim=-1).double().square()
    return squares @ weights


def _some_rows(rows: int, most: int) -> tuple[Sequence[int], Float[Tensor, " some"]]:
    """Numbers of sampled rows, and how many rows each one represents."""
    if rows <= most:
        return range(rows), torch.ones(rows, dtype=torch.float64)
    even = torch.linspace(0, rows - 1, most // 2, dtype=torch.float64)
    dense = torch.logspace(0, math.log10(rows), most - most // 2, dtype=torch.float64) - 1
    spread = torch.cat([even, dense]).round().long().clamp(0, rows - 1)
    numbers = sorted(set(spread.tolist()))
    places = torch.tensor(numbers)
    # Each sampled row represents the rows up to halfway to its neighbours.
    between = (places[1:] + places[:-1]).double() / 2
    ends = torch.cat([between.new_tensor([-0.5]), between, between.new_tensor([rows - 0.5])])
    return numbers, ends.diff()


def _probabilities(scores: HeadScores, numbers: Sequence[int]) -> Float[Tensor, "heads some keys"]:
    sample = scores.pick(numbers)
    room = scores.query.new_empty(scores.heads * len(numbers) * scores.keys)
    S = sample.strip(slice(0, len(numbers)), room)
    # a row that sees no key is NaN in a softmax
    P = torch.softmax(S, -1).masked_fill_(S.amax(-1, keepdim=True) == -torch.inf, 0.0)
    return torch.nn.functional.pad(P, (0, scores.keys - P.shape[-1]))


_STRIPS_PER_FLUSH = 8
_LEAST = -80.0
"""Scores minus the largest of their row are clamped here. One e^-80 = 2e-35 per key adds up to less than the last digit
of any result, and exponentials that underflow take a hundred times as long."""


@dataclass(frozen=True)
class PassSums:
    """The results of one walk for each head, in float64.

    Attributes:
        mass: sum of each row of P: 1 up to rounding, 0 for a row that sees nothing.
        p_log_p: sum of p log p of each row.
        first_mass: probability of one key of each head in each row.
        own_mass: probability of the key at the row's own position; 0 if there is none.
        energy: sum of squares of D.
        column: sum of each column of D.
    """

    mass: Float[Tensor, "heads rows"]
    p_log_p: Float[Tensor, "heads rows"]
    first_mass: Float[Tensor, "heads rows"]
    own_mass: Float[Tensor, "heads rows"]
    energy: Float[Tensor, " heads"]
    column: Float[Tensor, "heads keys"]


def attention_pass(
    scores: HeadScores, reference: Float[Tensor, "heads keys"], first_key: Int[Tensor, " heads"]
) -> PassSums:
    """Walk over all rows once; keys that are hidden from all rows of a strip are not visited.

    Strips are in the dtype of ``scores``, and sums along them; everything else is float64.

    Args:
        scores: the scores.
        reference: a row near the mean row of P, in float64.
        first_key: the key of each head for ``first_mass``.
    """
    like, heads, keys = scores.query, scores.heads, scores.keys
    # D is computed in the dtype of the strips, so r must be the reference as rounded to that dtype.
    r = reference.to(like)
    is_shifted = may_hold(r != 0)
    # |r|^2 over the keys from each one on: in keys that a strip does not visit D is -r.
    squared = r.double().square()
    beyond = torch.cat([squared.flip(-1).cumsum(-1).flip(-1), squared.new_zeros(heads, 1)], -1)
    empty = squared.new_zeros(heads, 0)
    by_row: list[tuple[Tensor, ...]] = [(empty, empty, empty, empty)]
    energy = squared.new_zeros(heads)
    # The sums of a few strips in their dtype and those of all in float64; what is to be subtracted times r is a sum of
    # weights, of the strips that end before a key (``hidden``) and of all.
    recent, columns = like.new_zeros(heads, 1, keys), squared.new_zeros(heads, keys)
    hidden, unequal = squared.new_zeros(heads, keys + 1), squared.new_zeros(heads, 1)
    room, spare = scores.room(), scores.room()
    for number, rows in enumerate(scores.strips(), 1):
        S = scores.strip(rows, room)
        seen = S.shape[-1]
        shift = S.amax(-1, keepdim=True)
        is_empty = shift == -torch.inf
        shift = shift.masked_fill(is_empty, 0.0)
        P = torch.exp(S.sub_(shift).clamp_min_(_LEAST), out=spare[: S.numel()].view(S.shape))
        mass = _row_sums(P)
        # sum of p log p = sum of e^s s, over the sum of e^s, minus the logarithm of that sum; both of one sign
        p_log_p = (_row_sums(S.mul_(P)) / mass - mass.log()).masked_fill_(is_empty.squeeze(-1), 0.0)
        share = (1 / mass).to(like).unsqueeze(-1)
        P.mul_(share)
        mass = mass * share.squeeze(-1)
        P.masked_fill_(is_empty, 0.0)
        mass = mass.masked_fill(is_empty.squeeze(-1), 0.0)
        inverse = torch.where(mass == 0, 1.0, 1 / mass)
        excess = 1 - inverse
        by_row.append((mass, p_log_p, *_entries_of(P, first_key, scores.places[rows], inverse)))
        # from here on D~ = P~ - 1r^T, in place
        D = P.sub_(r[:, None, :seen]) if is_shifted else P
        products = (r[:, None, :seen] @ D.mT).double().squeeze(-2) - beyond[:, seen, None]
        # |D_i|^2 = |D~_i|^2 / m^2 - 2 (e/m) D~_i.r + e^2 |r|^2
        squares = torch.linalg.vector_norm(D, dim=-1).double().square() + beyond[:, seen, None]
        energy += (inverse.square() * squares + excess.square() * beyond[:, :1]).sum(-1)
        energy -= 2 * (inverse * excess * products).sum(-1)
        # D^T 1 = D~^T (1 / m) - r (e^T 1). Weights are rounded once, so that keys beyond the strip get the same ones.
        left = inverse.to(like).unsqueeze(-2)
        recent[..., :seen].baddbmm_(left, D)
        hidden[:, seen] += left.double().sum((-2, -1))
        unequal += excess.sum(-1, keepdim=True)
        if number % _STRIPS_PER_FLUSH == 0:
            columns += recent.squeeze(-2)
            recent.zero_()
    columns += recent.squeeze(-2)
    columns -= (hidden.cumsum(-1)[:, :-1] + unequal) * r.double()
    mass, p_log_p, first_mass, own_mass = (torch.cat(part, -1) for part in zip(*by_row, strict=True))
    return PassSums(mass, p_log_p, first_mass, own_mass, energy, columns)


def _row_sums(X: Float[Tensor, "heads height seen"]) -> Float[Tensor, "heads height"]:
    """Sums of rows, in pieces of 512 entries in the dtype of X and over the pieces in float64."""
    whole = X.shape[-1] // 512 * 512
    pieces: Tensor = X[..., :whole].reshape(*X.shape[:-1], -1, 512).sum(-1).sum(-1, dtype=torch.float64)
    return pieces + X[..., whole:].sum(-1).double()


def _entries_of(
    P: Tensor, first_key: Tensor, places: Tensor, inverse: Tensor
) -> tuple[Float[Tensor, "heads height"], Float[Tensor, "heads height"]]:
    """The probabilities of the first key and of the key at each row's own position; 0 where there is no such key."""
    seen = P.shape[-1]
    first = P.gather(-1, first_key.clamp_max(seen - 1)[:, None, None].expand(-1, P.shape[1], 1)).squeeze(-1)
    own = P.gather(-1, places.clamp_max(seen - 1)[None, :, None].expand(len(P), -1, 1)).squeeze(-1)
    first = first.masked_fill((first_key >= seen)[:, None], 0.0).double() * inverse
    return first, own.masked_fill(places >= seen, 0.0).double() * inverse


@dataclass(frozen=True)
class _PartSums:
    first: PassSums
    energy: Float[Tensor, " heads"]
    centred_energy: Float[Tensor, " heads"]


class BlockwiseAttention(AttentionView):
    r"""Attention probabilities of ``query`` and ``key``, computed a few rows at a time when a reduction is requested.

    All sums come from one walk over the rows of each head; small heads are walked together. Memory is linear in the
    number of tokens. Singular values would take many walks and are not offered.
    Strips are in the dtype of ``query`` (float32 for half precision), sums over strips in float64.

    Args:
        query: ``(batch, heads, query, dim)``.
        key: ``(batch, key heads, key, dim)``; heads must be a multiple of key heads (grouped queries).
        mask: broadcastable to ``(batch, heads, query, key)``: True where a key is visible, or an additive mask.
        is_causal: a row sees keys up to its own position, counted from the first.
        scale: scale of the scores, 1/sqrt(dim) by default.
        keep: which query rows count, ``(batch, query)``.

    Raises:
        InputError: shapes that do not fit.

    Example:
        >>> q = torch.zeros(1, 1, 4, 2)
        >>> view = BlockwiseAttention(q, q)
        >>> round(float(view.relative_deviation), 12)
        0.0
    """

    def __init__(
        self,
        query: Float[Tensor, "batch heads query dim"],
        key: Float[Tensor, "batch key_heads key dim"],
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        keep: Bool[Tensor, "batch query"] | None = None,
    ) -> None:
        _check(query, key, keep)
        home = float64_home(query)
        self._query, self._key = query.detach().to(home), key.detach().to(home)
        self.batch_shape = tuple(query.shape[:2])
        self.keys = key.shape[2]
        self._scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        self._keep = None if keep is None else keep.detach().to(home)
        shape = (query.shape[0], query.shape[1], query.shape[2], self.keys)
        self._support = SupportRows(shape, home, None if mask is None else mask.detach().to(home), is_causal=is_causal)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the strips."""
        return torch.promote_types(self._query.dtype, torch.float32)

    @cached_property
    def valid(self) -> Bool[Tensor, "matrices query"]:
        """Which rows count."""
        shape = (*self.batch_shape, self._query.shape[2])
        if self._keep is None:
            return torch.ones(shape, dtype=torch.bool, device=self._query.device).flatten(0, 1)
        return self._keep.unsqueeze(1).expand(shape).flatten(0, 1)

    @cached_property
    def count(self) -> Float[Tensor, " matrices"]:
        """Number of query rows that count."""
        return self.valid.sum(-1).double()

    @property
    def fewest(self) -> int:
        """A number of rows that every matrix has at least."""
        return self._query.shape[2] if self._keep is None else 0

    @property
    def support_size(self) -> Float[Tensor, "matrices query"]:
        """Number of keys each row may see."""
        return self._support.size

    @property
    def sees_first(self) -> Bool[Tensor, "matrices query"]:
        """Whether a row may see the first key."""
        return self._support.sees_first

    @cached_property
    def sums(self) -> AttentionSums:
        """Mass, p log p and squares; rows that do not count have mass 1."""
        found = self._parts
        return AttentionSums(
            self._by_row([part.first.mass for part in found], 1.0),
            self._by_row([part.first.p_log_p for part in found], 0.0),
            self._by_matrix([part.energy for part in found]),
            self._by_matrix([part.centred_energy for part in found]),
        )

    @cached_property
    def first_mass(self) -> Float[Tensor, "matrices query"]:
        """Probability that each row gives to the first key; 0 in rows that do not count."""
        return self._by_row([part.first.first_mass for part in self._parts], 0.0)

    @property
    def sees_itself(self) -> Bool[Tensor, "matrices query"]:
        """Whether a row may see the key at its own position."""
        return self._support.sees_itself

    @cached_property
    def own_mass(self) -> Float[Tensor, "matrices query"]:
        """Probability that each row gives to the key at its own position; 0 in rows that do not count."""
        return self._by_row([part.first.own_mass for part in self._parts], 0.0)

    @property
    def largest_centred_singular_value(self) -> Float[Tensor, " matrices"]:
        """Not offered.

        Raises:
            UnsupportedOperationError: always.
        """
        raise UnsupportedOperationError("A singular value needs all probabilities; hold them, as AttentionMatrix does.")

    @cached_property
    def _parts(self) -> list[_PartSums]:
        return [self._read(part) for part in parts(self._query, self._key, self._positions)]

    def _read(self, part: Part) -> _PartSums:
        scores = HeadScores.of(
            self._query[part].flatten(0, 1),
            keys_of(part, self._key, self.batch_shape[1] // self._key.shape[1]),
            self._scale,
            self._positions[part[0].start],
            causal=self._support.is_causal,
            mask=self._support.mask_of(part),
        )
        n = scores.rows
        reference = reference_row(scores)
        first = attention_pass(scores, reference, self._support.first_key[part].flatten())
        r = reference.to(self.dtype).double()
        # The mean row of P is r + shift, so |CP|^2 = |D|^2 - n |shift|^2 and |P|^2 = |CP|^2 + n |r + shift|^2.
        shift = first.column / max(1, n)
        centred = (first.energy - n * shift.square().sum(-1)).clamp_min(0.0)
        energy = centred + n * (r + shift).square().sum(-1)
        # If no row sees a key, P = 0, and r only rounding.
        energy = energy.masked_fill((first.mass == 0).all(-1), 0.0)
        return _PartSums(first, energy, centred)

    @cached_property
    def _positions(self) -> Sequence[Sequence[int]]:
        """The positions of the rows that count, of each sequence, on the host."""
        if self._keep is None:
            return [range(self._query.shape[2])] * self.batch_shape[0]
        return [row.nonzero().flatten().tolist() for row in self._keep.cpu()]

    def _by_row(self, parts: list[Tensor], otherwise: float) -> Tensor:
        found = torch.full(self.valid.shape, otherwise, dtype=torch.float64, device=self._query.device)
        return found.masked_scatter_(self.valid, torch.cat([part.flatten() for part in parts])) if parts else found

    def _by_matrix(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if parts else self.count.new_zeros(0)


def _check(query: Tensor, key: Tensor, keep: Tensor | None) -> None:
    fits = query.ndim == key.ndim == 4 and query.shape[0] == key.shape[0] and query.shape[-1] == key.shape[-1]
    if not fits or key.shape[2] == 0 or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise InputError(
            f"query has the shape {tuple(query.shape)} and key {tuple(key.shape)}. Expected (batch, heads, tokens, "
            "dim) of the same batch and dim, at least one key, and heads of query a multiple of those of key."
        )
    expected = (query.shape[0], query.shape[2])
    if keep is not None and (keep.dtype != torch.bool or tuple(keep.shape) != expected):
        raise InputError(
            f"keep is a {keep.dtype} tensor of shape {tuple(keep.shape)}. Expected booleans of shape {expected}, "
            "one per query: pass attention_mask.bool()."
        )
