r"""Attention on long sequences: the reductions of every attention metric, without a query by key matrix.

One walk over strips of rows yields all sums and a product with the matrix. Everything is computed
for :math:`D = P - 1r^T` with a reference row r near the mean row: CP = CD, and sums of squares of D
do not cancel when rows are nearly equal, as those of P would. A row is divided by its sum as rounded to the dtype of
the strip, which makes it :math:`\tilde P = \mathrm{diag}(m)P` with masses m that differ from 1 by that rounding. The
small results are corrected for it:

.. math:: D = \mathrm{diag}(1/m)\tilde D - e r^T, \qquad \tilde D = \tilde P - 1r^T, \quad e = 1 - 1/m .

A walk starts with a row near the mean row, and with directions near the top singular vectors. Both come from a sample
of rows, each weighted by the number of rows it represents. Half of them are evenly spaced; the other half are denser
towards the beginning, where rows of a causal mask are short, large and different from each other. A poor sample costs
more steps or a wider interval, but never correctness.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg.attention_view import AttentionSums, AttentionView
from rankscope.linalg.largest_singular_value import SingularValue, largest_singular_values, singular_value_within
from rankscope.linalg.precision import float64_home, is_wide, may_hold
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


BLOCK = 6
"""Number of directions multiplied in one walk: a product with so few costs less than the exponentials."""

_ROWS_FOR_MEAN = 32
_ROWS_FOR_DIRECTIONS = 256
_SEED = 0
_NEAR_EQUAL = 0.3
"""Relative deviation of the rows above which sums of squares are accurate enough without a reference row."""


def attention_start(
    scores: HeadScores, *, directions: bool
) -> tuple[Float[Tensor, "heads keys"], Float[Tensor, "heads keys block"]]:
    """A reference row, and orthonormal starting directions (no columns if not requested), of each head.

    The directions are the top right singular vectors of the sampled rows, centred, and one random direction, so that
    no singular vector is orthogonal to all of them.

    Args:
        scores: their scores.
        directions: whether to compute directions.
    """
    if scores.rows == 0:
        zero = torch.zeros(scores.heads, scores.keys, dtype=torch.float64, device=scores.query.device)
        return zero, zero.new_zeros(scores.heads, scores.keys, 0)
    numbers, weights = _some_rows(scores.rows, _ROWS_FOR_DIRECTIONS if directions else _ROWS_FOR_MEAN)
    weights = weights.to(scores.query.device, non_blocking=True)
    P = _probabilities(scores, numbers)
    mean = ((weights / weights.sum()).to(P) @ P).double()
    energy = _weighted_squares(P, weights)
    D = P.sub_(mean.to(P).unsqueeze(-2))
    is_near_equal = _weighted_squares(D, weights) <= _NEAR_EQUAL**2 * energy
    reference = mean.masked_fill(~is_near_equal.unsqueeze(-1), 0.0)
    if not directions:
        return reference, reference.new_zeros(scores.heads, scores.keys, 0)
    return reference, _directions(D.mul_(weights.sqrt().to(D).unsqueeze(-1)), min(BLOCK, scores.keys))


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


def _directions(D: Float[Tensor, "heads some keys"], count: int) -> Float[Tensor, "heads keys block"]:
    gram = (D @ D.mT).double()
    broken = ~gram.isfinite().all(-1).all(-1)[:, None, None]
    # Right singular vectors of D as images of the left ones: D has far fewer rows than columns.
    vectors = torch.linalg.eigh(gram.masked_fill(broken, 0.0)).eigenvectors[..., max(0, gram.shape[-1] + 1 - count) :]
    images = (D.mT @ vectors.to(D)).double()
    lengths = torch.linalg.vector_norm(images, dim=-2, keepdim=True)
    generator = torch.Generator().manual_seed(_SEED)
    chance = torch.randn(D.shape[-1], count, dtype=torch.float64, generator=generator).to(D.device, non_blocking=True)
    chance = chance.expand(len(D), -1, -1)
    found = torch.where(lengths > 0, images / lengths, chance[..., : images.shape[-1]])
    orthonormal: Tensor = torch.linalg.qr(torch.cat([found, chance[..., images.shape[-1] :]], -1)).Q
    return orthonormal


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
        log_sums: logarithm of the sum of the exponentials of each row, infinite for a row that sees nothing.
        first_mass: probability of one key of each head in each row.
        own_mass: probability of the key at the row's own position; 0 if there is none.
        energy: sum of squares of D.
        column: sum of each column of D.
        total: sum of each column of DZ, Z the probes.
        gram: :math:`(DZ)^TDZ`.
        image: :math:`D^TDZ`, if requested.
    """

    mass: Float[Tensor, "heads rows"]
    p_log_p: Float[Tensor, "heads rows"]
    log_sums: Float[Tensor, "heads rows"]
    first_mass: Float[Tensor, "heads rows"]
    own_mass: Float[Tensor, "heads rows"]
    energy: Float[Tensor, " heads"]
    column: Float[Tensor, "heads keys"]
    total: Float[Tensor, "heads probes"]
    gram: Float[Tensor, "heads probes probes"]
    image: Float[Tensor, "heads keys probes"] | None


def attention_pass(
    scores: HeadScores,
    reference: Float[Tensor, "heads keys"],
    probes: Float[Tensor, "heads keys probes"],
    *,
    first_key: Int[Tensor, " heads"] | None = None,
    log_sums: Float[Tensor, "heads rows"] | None = None,
    image: bool = False,
) -> PassSums:
    """Walk over all rows once; keys that are hidden from all rows of a strip are not visited.

    Strips are in the dtype of ``scores``, and sums along them; everything else is float64.

    Args:
        scores: the scores.
        reference: a row near the mean row of P, in float64.
        probes: Z, in float64; zero columns if no product is needed.
        first_key: the key of each head for ``first_mass``; needed in the first walk.
        log_sums: those of the first walk. A walk that is given them is shorter, and computes products only.
        image: also compute D^T(DZ).
    """
    like, heads, keys, count = scores.query, scores.heads, scores.keys, probes.shape[-1]
    # D is computed in the dtype of the strips, so r must be the reference as rounded to that dtype.
    r = reference.to(like)
    is_shifted = may_hold(r != 0)
    # One product of a strip with [Z, r] gives DZ and D r together.
    # Stored transposed: a few rows times a transposed strip is the faster order of this product.
    small = torch.cat([probes.to(like), r.unsqueeze(-1)], -1).mT.contiguous()
    # r^T [Z, r] over the keys from each one on: in keys that a strip does not visit D is -r.
    along = r.double().unsqueeze(-2) * small.double()
    beyond = torch.cat([along.flip(-1).cumsum(-1).flip(-1), along.new_zeros(heads, count + 1, 1)], -1).mT
    empty = along.new_zeros(heads, 0)
    by_row: list[tuple[Tensor, ...]] = [(empty, empty, empty.to(like), empty, empty)]
    energy, total, gram = along.new_zeros(heads), along.new_zeros(heads, count), along.new_zeros(heads, count, count)
    width = (count if image else 0) + 1
    # The sums of a few strips in their dtype and those of all in float64; what is to be subtracted times r is a sum of
    # weights, of the strips that end before a key (``hidden``) and of all.
    recent, columns = like.new_zeros(heads, width, keys), along.new_zeros(heads, width, keys)
    hidden, unequal = along.new_zeros(heads, width, keys + 1), along.new_zeros(heads, width, 1)
    room, spare = scores.room(), scores.room()
    for number, rows in enumerate(scores.strips(), 1):
        S = scores.strip(rows, room)
        seen = S.shape[-1]
        if log_sums is None:
            shift = S.amax(-1, keepdim=True)
            is_empty = shift == -torch.inf
            shift = shift.masked_fill(is_empty, 0.0)
        else:
            shift = log_sums[:, rows, None]
            is_empty = shift == torch.inf
        P = torch.exp(S.sub_(shift).clamp_min_(_LEAST), out=spare[: S.numel()].view(S.shape))
        mass = _row_sums(P)
        if log_sums is None:
            # sum of p log p = sum of e^s s, over the sum of e^s, minus the logarithm of that sum; both of one sign
            p_log_p = (_row_sums(S.mul_(P)) / mass - mass.log()).masked_fill_(is_empty.squeeze(-1), 0.0)
            log_sum = (shift.squeeze(-1) + mass.log().to(like)).masked_fill_(is_empty.squeeze(-1), torch.inf)
            share = (1 / mass).to(like).unsqueeze(-1)
            P.mul_(share)
            mass = mass * share.squeeze(-1)
        P.masked_fill_(is_empty, 0.0)
        mass = mass.masked_fill(is_empty.squeeze(-1), 0.0)
        inverse = torch.where(mass == 0, 1.0, 1 / mass)
        excess = 1 - inverse
        if first_key is not None:
            by_row.append((mass, p_log_p, log_sum, *_entries_of(P, first_key, scores.places[rows], inverse)))
        # from here on D~ = P~ - 1r^T, in place
        D = P.sub_(r[:, None, :seen]) if is_shifted else P
        products = (small[..., :seen] @ D.mT).double().mT - beyond[:, seen].unsqueeze(1)
        if log_sums is None:
            # |D_i|^2 = |D~_i|^2 / m^2 - 2 (e/m) D~_i.r + e^2 |r|^2
            squares = torch.linalg.vector_norm(D, dim=-1).double().square() + beyond[:, seen, -1:]
            energy += (inverse.square() * squares + excess.square() * beyond[:, 0, -1:]).sum(-1)
            energy -= 2 * (inverse * excess * products[..., -1]).sum(-1)
        # W = DZ = D~Z / m - e (r^T Z)
        W = inverse.unsqueeze(-1) * products[..., :-1] - excess.unsqueeze(-1) * beyond[:, :1, :-1]
        total += W.sum(-2)
        gram += W.mT @ W
        W = torch.cat([W, W.new_ones(*W.shape[:2], 1)], -1) if image else W.new_ones(*W.shape[:2], 1)
        # D^T W = D~^T (W / m) - r (e^T W). Weights are rounded once, so that keys beyond the strip get the same ones.
        left = (inverse.unsqueeze(-1) * W).to(like).mT.contiguous()
        recent[..., :seen].baddbmm_(left, D)
        hidden[..., seen] += left.double().sum(-1)
        unequal += W.mT @ excess.unsqueeze(-1)
        if number % _STRIPS_PER_FLUSH == 0:
            columns += recent
            recent.zero_()
    columns += recent
    columns -= (hidden.cumsum(-1)[..., :-1] + unequal) * r.unsqueeze(-2).double()
    mass, p_log_p, log_sums, first_mass, own_mass = (torch.cat(part, -1) for part in zip(*by_row, strict=True))
    return PassSums(
        mass, p_log_p, log_sums, first_mass, own_mass, energy, columns[:, -1], total, gram,
        columns[:, :-1].mT if image else None,
    )  # fmt: skip


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


PASS_ENTRIES = 1 << 30
"""How many probabilities of one head the iterations for its largest singular value may visit by default."""

_MOST_PASSES = 400
_TOLERANCE = {True: 1e-10, False: 1e-5}
_UNKNOWN = SingularValue(math.nan, math.nan, False, 0)


@dataclass(frozen=True)
class _PartSums:
    first: PassSums
    energy: Float[Tensor, " heads"]
    centred_energy: Float[Tensor, " heads"]
    tops: list[SingularValue]


class BlockwiseAttention(AttentionView):
    r"""Attention probabilities of ``query`` and ``key``, computed a few rows at a time when a reduction is requested.

    All sums come from one walk over the rows of each head; small heads are walked together. Memory is linear in the
    number of tokens. The largest singular value of CP takes further walks, until it converges or ``passes`` are used
    up; in the latter case it is the lower bound reached so far, and :attr:`is_spectrum_estimated` is True.
    Strips are in the dtype of ``query`` (float32 for half precision), sums over strips in float64.

    Args:
        query: ``(batch, heads, query, dim)``.
        key: ``(batch, key heads, key, dim)``; heads must be a multiple of key heads (grouped queries).
        mask: broadcastable to ``(batch, heads, query, key)``: True where a key is visible, or an additive mask.
        is_causal: a row sees keys up to its own position, counted from the first.
        scale: scale of the scores, 1/sqrt(dim) by default.
        keep: which query rows count, ``(batch, query)``.
        spectrum: whether the largest singular value will be needed: the first walk then computes part of it.
        passes: walks per head for the largest singular value; by default as many as :data:`PASS_ENTRIES` allows.

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
        spectrum: bool = False,
        passes: int | None = None,
    ) -> None:
        _check(query, key, keep, passes)
        home = float64_home(query)
        self._query, self._key = query.detach().to(home), key.detach().to(home)
        self.batch_shape = tuple(query.shape[:2])
        self.keys = key.shape[2]
        self._scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        self._keep = None if keep is None else keep.detach().to(home)
        shape = (query.shape[0], query.shape[1], query.shape[2], self.keys)
        self._support = SupportRows(shape, home, None if mask is None else mask.detach().to(home), is_causal=is_causal)
        self._spectrum, self._passes = spectrum, passes

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the strips."""
        return torch.promote_types(self._query.dtype, torch.float32)

    @cached_property
    def kept(self) -> Bool[Tensor, "matrices query"]:
        """Which rows count."""
        shape = (*self.batch_shape, self._query.shape[2])
        if self._keep is None:
            return torch.ones(shape, dtype=torch.bool, device=self._query.device).flatten(0, 1)
        return self._keep.unsqueeze(1).expand(shape).flatten(0, 1)

    @cached_property
    def count(self) -> Float[Tensor, " matrices"]:
        """Number of query rows that count."""
        return self.kept.sum(-1).double()

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
        """Largest singular value of CP, or a lower bound on it; NaN for P = 0."""
        return self._of_tops([top.lower for top in self.singular_values])

    @property
    def centred_singular_value_bound(self) -> Float[Tensor, " matrices"]:
        """Upper bound on the largest singular value of CP, up to rounding; NaN for P = 0."""
        return self._of_tops([top.upper for top in self.singular_values])

    @property
    def is_spectrum_estimated(self) -> Bool[Tensor, " matrices"]:
        """Where the iterations for the largest singular value did not converge."""
        return self._of_tops([top.is_estimate for top in self.singular_values]).bool()

    @cached_property
    def singular_values(self) -> list[SingularValue]:
        """The largest singular value of CP of each matrix, with an interval that contains it."""
        found = self._parts if self._spectrum else self._read_all(spectrum=True)
        return [top for part in found for top in part.tops]

    @cached_property
    def _parts(self) -> list[_PartSums]:
        return self._read_all(spectrum=self._spectrum)

    def _read_all(self, *, spectrum: bool) -> list[_PartSums]:
        return [self._read(part, spectrum) for part in parts(self._query, self._key, self._positions)]

    def _read(self, part: Part, spectrum: bool) -> _PartSums:
        scores = HeadScores.of(
            self._query[part].flatten(0, 1),
            keys_of(part, self._key, self.batch_shape[1] // self._key.shape[1]),
            self._scale,
            self._positions[part[0].start],
            causal=self._support.is_causal,
            mask=self._support.mask_of(part),
        )
        n = scores.rows
        passes = self._budget(n)
        reference, probes = attention_start(scores, directions=spectrum)
        key = self._support.first_key[part].flatten()
        first = attention_pass(scores, reference, probes, first_key=key, image=spectrum and passes > 1)
        r = reference.to(self.dtype).double()
        # The mean row of P is r + shift, so |CP|^2 = |D|^2 - n |shift|^2 and |P|^2 = |CP|^2 + n |r + shift|^2.
        shift = first.column / max(1, n)
        centred = (first.energy - n * shift.square().sum(-1)).clamp_min(0.0)
        energy = centred + n * (r + shift).square().sum(-1)
        # If no row sees a key, P = 0, and r only rounding.
        energy = energy.masked_fill((first.mass == 0).all(-1), 0.0)
        tops = self._tops(scores, r, probes, first, energy, centred, passes) if spectrum else [_UNKNOWN] * scores.heads
        return _PartSums(first, energy, centred, tops)

    @cached_property
    def _positions(self) -> Sequence[Sequence[int]]:
        """The positions of the rows that count, of each sequence, on the host."""
        if self._keep is None:
            return [range(self._query.shape[2])] * self.batch_shape[0]
        return [row.nonzero().flatten().tolist() for row in self._keep.cpu()]

    def _budget(self, rows: int) -> int:
        """How many walks the largest singular value may take."""
        affordable = max(1, min(_MOST_PASSES, PASS_ENTRIES // max(1, rows * self.keys)))
        return affordable if self._passes is None else self._passes

    def _tops(
        self,
        scores: HeadScores,
        r: Tensor,
        probes: Tensor,
        first: PassSums,
        energy: Tensor,
        centred_energy: Tensor,
        passes: int,
    ) -> list[SingularValue]:
        """The largest singular values. Small matrices are on the host, whose LAPACK is the faster one for them."""
        n = scores.rows
        # |CP|_2^2 <= |P|_2^2 <= |P|_1 |P|_inf, and rows sum to one: the bound is the root of the largest column sum.
        upper = (first.column + n * r).amax(-1).clamp_min(0.0).sqrt()
        defined = (energy > 0) & energy.isfinite()
        known, energies, bounds = torch.stack([defined.double(), centred_energy, upper]).cpu().tolist()
        tolerance = _TOLERANCE[is_wide(self.dtype)]
        if first.image is None:
            grams = (first.gram - first.total.unsqueeze(-1) * first.total.unsqueeze(-2) / n).cpu()
            return [
                singular_value_within(gram, inside, bound, tolerance=tolerance) if is_known else _UNKNOWN
                for is_known, gram, inside, bound in zip(known, grams, energies, bounds, strict=True)
            ]
        numbers = [number for number, is_known in enumerate(known) if is_known]

        @functools.lru_cache(maxsize=1)
        def only(which: tuple[int, ...]) -> tuple[HeadScores, Tensor, Tensor]:
            if len(which) == scores.heads:
                return scores, r, first.log_sums
            chosen = torch.tensor([numbers[one] for one in which]).to(r.device, non_blocking=True)
            return scores.only(chosen), r[chosen], first.log_sums[chosen]

        def centred(found: PassSums) -> Tensor:
            # (CD)^T CDZ = D^T DZ - (D^T 1)(1^T DZ) / n.
            assert found.image is not None
            return (found.image - (found.column / n).unsqueeze(-1) * found.total.unsqueeze(-2)).cpu()

        def normal(which: Sequence[int], Z: Tensor) -> Tensor:
            some, reference, log_sums = only(tuple(which))
            Z = Z.to(r.device, non_blocking=True)
            return centred(attention_pass(some, reference, Z, log_sums=log_sums, image=True))

        tops = largest_singular_values(
            normal,
            probes.cpu()[numbers],
            centred(first)[numbers],
            [energies[number] for number in numbers],
            upper=[bounds[number] for number in numbers],
            passes=passes,
            tolerance=tolerance,
        )
        found = dict(zip(numbers, tops, strict=True))
        return [found.get(number, _UNKNOWN) for number in range(scores.heads)]

    def _by_row(self, parts: list[Tensor], otherwise: float) -> Tensor:
        found = torch.full(self.kept.shape, otherwise, dtype=torch.float64, device=self._query.device)
        return found.masked_scatter_(self.kept, torch.cat([part.flatten() for part in parts])) if parts else found

    def _by_matrix(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if parts else self.count.new_zeros(0)

    def _of_tops(self, values: list[float] | list[bool]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._query.device)


def _check(query: Tensor, key: Tensor, keep: Tensor | None, passes: int | None) -> None:
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
    if passes is not None and passes < 1:
        raise InputError(f"passes={passes}: expected at least one walk per head.")
