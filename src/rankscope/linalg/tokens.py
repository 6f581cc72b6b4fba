r"""The tokens of a batch of sequences, and the float64 reductions that token metrics are computed from.

Gram matrices of X and of CX are formed on the smaller side. The Gram matrix of CX is computed first; that of X
follows by adding the terms of the mean m,

.. math:: XX^T = (CX)(CX)^T + a 1^T + 1 a^T + \|m\|^2 11^T, \quad a = CX\,m, \qquad X^TX = (CX)^T(CX) + n\,m m^T .

The reverse, subtracting the mean from the Gram matrix of X, would cancel every digit exactly when tokens collapse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg import spectrum, tiles
from rankscope.linalg.joining import Joinable, Made
from rankscope.linalg.pairs import (
    MOST_TOKENS,
    PairDistances,
    Pairs,
    centred_pair_statistics,
    outlier_energy,
    pair_statistics,
    squared_distances,
    without_outliers,
)
from rankscope.linalg.precision import float64_home, is_wide, may_hold, power_of_two_below
from rankscope.linalg.threads import available_threads
from rankscope.linalg.triangular_factor import chunks, is_tall, triangular_factor

_SLAB_ENTRIES = 1 << 21

Spectra = Literal["exact", "estimated"]
SAMPLED_TOKENS = 1024
"""Estimated spectra are those of so many evenly spaced tokens; the cost of exact ones grows with the cube of
min(tokens, dim). Up to this side spectra are exact by default."""


class Tokens(Joinable):
    """Tokens ``x`` of shape ``(*batch, tokens, dim)``, viewed as one matrix X per sequence.

    Reductions are computed in float64 on the device of ``x``, piece by piece, on first use, and cached: metrics given
    the same ``Tokens`` share them. ``x`` itself is neither copied nor changed. All reductions have one leading
    ``sequences`` axis (the batch axes, flattened) and are in units of :attr:`scale`.

    Args:
        x: any floating dtype.
        keep: which tokens count, ``(*batch, tokens)``. Padding and special tokens are excluded as if they did not
            exist, so sequences may differ in length. Omit it if every token counts, which is faster.
        spectra: ``"exact"``; ``"estimated"``, from 1,024 evenly spaced tokens of more; None to choose by size.

    Raises:
        InputError: ``x`` is not a floating tensor with at least two axes, or ``keep`` does not fit it.
    """

    def __init__(
        self,
        x: Float[Tensor, "*batch tokens dim"],
        keep: Bool[Tensor, "*batch tokens"] | None = None,
        *,
        spectra: Spectra | None = "exact",
    ) -> None:
        if not x.is_floating_point() or x.ndim < 2 or x.shape[-1] == 0:
            raise InputError(
                f"Tokens were given as a {x.dtype} tensor of shape {tuple(x.shape)}. Expected floating numbers of "
                "shape (*batch, tokens, dim): pass hidden states, not token ids."
            )
        if keep is not None and (keep.dtype != torch.bool or keep.shape != x.shape[:-1]):
            raise InputError(
                f"keep is a {keep.dtype} tensor of shape {tuple(keep.shape)}. Expected booleans of shape "
                f"{tuple(x.shape[:-1])}, one per token: pass attention_mask.bool()."
            )
        self.made = Made(Tokens, (x.detach(), keep), (("spectra", spectra),))
        self.batch_shape = tuple(x.shape[:-2])
        self.device = float64_home(x)
        self.dtype = x.dtype
        sequences = math.prod(self.batch_shape)  # not -1, which is ambiguous without tokens
        self._x = x.detach().reshape(sequences, *x.shape[-2:]) if x.ndim != 3 else x.detach()
        self.sequences, self.tokens, self.dim = self._x.shape
        self.fewest = self.tokens if keep is None else 0
        size = {"exact": 0, "estimated": self.tokens, None: _side(self)}[spectra]
        self.has_estimated_spectra = self.sequences > 0 and size > SAMPLED_TOKENS
        self._drop = None if keep is None else ~keep.detach().to(self.device).reshape(-1, self.tokens)

    @cached_property
    def count(self) -> Float[Tensor, " sequences"]:
        """Number n of tokens that count."""
        if self._drop is None:
            return torch.full((self.sequences,), float(self.tokens), dtype=torch.float64, device=self.device)
        return (~self._drop).sum(-1).double()

    @property
    def valid(self) -> Bool[Tensor, "sequences tokens"]:
        """Which tokens count."""
        if self._drop is None:
            return torch.ones(self.sequences, self.tokens, dtype=torch.bool, device=self.device)
        return ~self._drop

    @cached_property
    def scale(self) -> Float[Tensor, " sequences"]:
        """The power of two that divides X: near its largest entry for float64, whose squares may overflow, else 1."""
        if not is_wide(self.dtype):
            return torch.ones_like(self.count)
        largest = self.zeros()
        room = self.room()
        for group, rows in self.pieces():
            X = self.read(group, rows, room).abs_()
            largest[group] = torch.maximum(largest[group], X.amax((-2, -1)))
        return power_of_two_below(largest)

    @cached_property
    def mean(self) -> Float[Tensor, "sequences dim"]:
        """Mean token."""
        return self._norm_sums.mean.whole.squeeze(-2)

    @cached_property
    def finite(self) -> Bool[Tensor, " sequences"]:
        """Whether every entry that counts is a finite number."""
        return torch.isfinite(self.energies.row.sum(-1))

    @cached_property
    def directed(self) -> Float[Tensor, " sequences"]:
        """Number of nonzero tokens, which have a direction."""
        nonzero = (self._x != 0).any(-1).to(self.device)
        return (nonzero if self._drop is None else nonzero & ~self._drop).sum(-1).double()

    @cached_property
    def relative_deviation(self) -> Float[Tensor, " sequences"]:
        r""":math:`\|CX\|_F / \|X\|_F`, the quantity that is compared with the float floor."""
        return (self.energies.centred_row.sum(-1) / self.energies.row.sum(-1)).sqrt()

    def is_resolved(self, floor: float) -> Bool[Tensor, " sequences"]:
        r"""Whether differences between tokens are above the rounding of their dtype; False for X = 0.

        Rounding is relative to each entry. One huge channel increases the norm of X in :attr:`relative_deviation`, but
        not the rounding of the other channels. So channels with more than 100 times the median energy are each
        compared with their own norm, and the other channels with their common norm.
        """
        above = self.relative_deviation > floor
        unclear = ~above & self.finite & (self.energies.row.sum(-1) > 0)
        if may_hold(unclear):
            above |= unclear & is_resolved(self, floor)
        return above

    @property
    def energies(self) -> Energies:
        """Sums of squares along rows and columns."""
        return self._norm_sums.energies

    @property
    def linear_sums(self) -> LinearSums:
        """Sums of absolute values along rows and columns, and of directions."""
        return self._norm_sums.linear

    @cached_property
    def column_ranges(self) -> ColumnRanges:
        """Extremes of each column."""
        return column_ranges(self)

    @cached_property
    def column_median_deviation(self) -> Float[Tensor, "sequences dim"]:
        """Sum over each column of the distances from its median."""
        return column_median_deviation(self)

    @cached_property
    def unit_energy(self) -> Float[Tensor, "sequences dim"]:
        """Sums of squares along the columns, each row in units of its own energy."""
        return unit_energy(self)

    @cached_property
    def gram_energies(self) -> GramEnergies:
        """Sums of fourth powers of the singular values of X and of CX, without computing any of them."""
        return gram_energies(self)

    @cached_property
    def singular_values(self) -> Float[Tensor, "sequences side"]:
        """Singular values of X, largest first, zero beyond the rank its shape allows."""
        return singular_values(self, centred=False)

    @cached_property
    def centred_singular_values(self) -> Float[Tensor, "sequences side"]:
        """Singular values of CX, largest first, zero beyond the rank its shape allows."""
        return singular_values(self, centred=True)

    @cached_property
    def _both_eigenvalues(self) -> Float[Tensor, "twice_sequences side"]:
        """Eigenvalues of the Gram matrices of X and then of CX."""
        return spectrum.gram_eigenvalues(torch.cat(self.cached_grams))

    @cached_property
    def sampled(self) -> Tokens:
        """At most 1,024 evenly spaced tokens of each sequence, whose spectra are the estimates."""
        x, known = self._evenly_spaced(slice(0, self.sequences), SAMPLED_TOKENS)
        found = Tokens(x, None if known is None else known.to(x.device))
        found.batch_shape = self.batch_shape
        return found

    @cached_property
    def cached_grams(self) -> Grams:
        """Gram matrices of all sequences, cached; used only if they are small."""
        return all_grams(self)

    @cached_property
    def pair_distances(self) -> PairDistances:
        """Distances of all pairs of tokens, on an accelerator; on a CPU they leave the cache with each group."""
        return pair_distances(self)

    @cached_property
    def pairs(self) -> Pairs:
        """Medians and counts over the distances of pairs of tokens."""
        return pairs(self)

    def rank_limit(self, *, centred: bool) -> Float[Tensor, " sequences"]:
        """The largest rank that the shape of X allows, or that of CX, which loses one dimension to centring."""
        return (self.count - float(centred)).clamp(0.0, float(self.dim))

    def zeros(self, *width: int) -> Float[Tensor, "sequences ..."]:
        """Zeros to accumulate one number, or one vector, per sequence."""
        return torch.zeros(self.sequences, *width, dtype=torch.float64, device=self.device)

    @property
    def keeps_bits(self) -> bool:
        """Whether bits depend neither on the number of threads nor on what the view is joined with."""
        return self.sequences > 1 and tiles.are_paired(self.tokens, self.dim, self.device)

    @property
    def are_large(self) -> bool:
        """Whether a sequence alone fills the cache of a CPU. It depends on its shape only."""
        return self.device.type == "cpu" and tiles.are_large(self.tokens, self.dim)

    def groups(self) -> Iterator[slice]:
        """The sequences, a few at a time."""
        return tiles.groups(self.sequences, self.tokens, self.dim, self.device)

    def strips(self) -> Iterator[slice]:
        """The tokens of long sequences, a few at a time."""
        return tiles.strips(self.tokens, self.dim, self.device)

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        """The sequences, a few at a time, and for long ones a few tokens at a time."""
        for group in self.groups():
            for rows in self.strips():
                yield group, rows

    def room(self) -> Tensor:
        """A buffer large enough for any piece."""
        return tiles.piece_room(self.sequences, self.tokens, self.dim, self.device)

    def group_room(self) -> Tensor:
        """A buffer for all tokens of a group of sequences."""
        return tiles.group_room(self.sequences, self.tokens, self.dim, self.device)

    def piece(self, group: slice, rows: slice, room: Tensor | None = None) -> Tensor:
        """One piece of X in float64 and in units of the scale, zero for dropped tokens.

        It is stored in ``room``, until the next piece overwrites it, or in fresh memory. The caller may write to it.
        """
        X = self.read(group, rows, room)
        return X.div_(self.scale[group, None, None]) if is_wide(self.dtype) else X

    def centred_piece(self, group: slice, rows: slice, room: Tensor | None = None) -> Tensor:
        """The same piece of CX."""
        X = self.piece(group, rows, room)
        return centre_(X, self._norm_sums.mean.of(group), self.valid_bits(group, rows))

    def slabs(self, group: slice) -> Iterator[slice]:
        """The channels, a few at a time, of all tokens of a group: for reductions that need whole columns."""
        width = max(1, _SLAB_ENTRIES // max(1, (group.stop - group.start) * self.tokens))
        return (slice(start, min(self.dim, start + width)) for start in range(0, self.dim, width))

    def slab(self, group: slice, channels: slice) -> Tensor:
        """A few channels of X in float64 and in units of the scale, zero for dropped tokens."""
        x = self._x[group, :, channels]
        X = torch.empty(x.shape, dtype=torch.float64, device=self.device).copy_(x)
        clear_(X, self.valid_bits(group, slice(None)))
        return X.div_(self.scale[group, None, None]) if is_wide(self.dtype) else X

    def sample(self, group: slice, size: int) -> tuple[Tensor, Tensor | None]:
        """At most ``size`` of the tokens that count in each sequence, evenly spaced, in float64 and units of the scale.

        Returns a fresh tensor, and which of its places hold a token, ``(group, size)``; None if all do.
        """
        x, known = self._evenly_spaced(group, size)
        X = torch.empty(x.shape, dtype=torch.float64, device=self.device).copy_(x)
        if known is not None:
            X.masked_fill_(~known.unsqueeze(-1), 0.0)
        return (X.div_(self.scale[group, None, None]) if is_wide(self.dtype) else X), known

    def _evenly_spaced(self, group: slice, size: int) -> tuple[Tensor, Tensor | None]:
        """The same as they were given, on their own device; places without a token hold any other."""
        x = self._x[group]
        if self._drop is None:
            place = torch.linspace(0, self.tokens - 1, size, dtype=torch.float64, device=self.device).round_().long()
            return (x.index_select(-2, place.to(x.device)) if size < self.tokens else x), None
        order = self._drop[group].to(torch.int8).argsort(dim=-1, stable=True)  # tokens that count first, in order
        count = self.count[group, None]
        step = torch.arange(size, dtype=torch.float64, device=self.device)
        spread = (step * (count - 1).clamp_min(0.0) / max(1, size - 1)).round_()
        known = step < count
        place = order.gather(-1, torch.where(count > size, spread, step.expand_as(spread)).long())
        return x.gather(-2, place.to(x.device).unsqueeze(-1).expand(-1, -1, self.dim)), known

    def entries(self, channel: Int[Tensor, "sequences tokens"]) -> Float[Tensor, "sequences tokens"]:
        """One entry of each token, including dropped tokens, in the units of ``x``."""
        place = channel.unsqueeze(-1).to(self._x.device)
        return self._x.gather(-1, place).squeeze(-1).to(self.device).double()

    def dropped(self, group: slice, rows: slice) -> Bool[Tensor, "group rows 1"] | None:
        """Which tokens of the piece do not count."""
        return None if self._drop is None else self._drop[group, rows].unsqueeze(-1)

    def valid_bits(self, group: slice, rows: slice) -> Int[Tensor, "group rows 1"] | None:
        """A bit mask per token: all bits set if it counts, none otherwise (see :func:`clear_`)."""
        return None if self._valid_bits is None else self._valid_bits[group, rows]

    @cached_property
    def _norm_sums(self) -> NormSums:
        return norm_sums(self)

    @cached_property
    def _valid_bits(self) -> Tensor | None:
        # As int64, False - 1 = -1 has all bits set and True - 1 = 0 has none.
        return None if self._drop is None else self._drop.long().sub_(1).unsqueeze(-1)

    def read(self, group: slice, rows: slice, room: Tensor | None) -> Tensor:
        """The same as :meth:`piece` in the units of ``x``."""
        x = self._x[group, rows]
        X = torch.empty(x.shape, dtype=torch.float64, device=self.device) if room is None else fitting(room, x)
        return clear_(X.copy_(x), self.valid_bits(group, rows))


Reader = Callable[[], Iterable[tuple[slice, Tensor]]]


class Mean(NamedTuple):
    """The mean token of each sequence.

    ``tail`` is the rounding error of ``value``: for float64 tokens near collapse, it would be visible in CX.
    """

    value: Float[Tensor, "sequences 1 dim"]
    tail: Float[Tensor, "sequences 1 dim"] | None

    @property
    def whole(self) -> Float[Tensor, "sequences 1 dim"]:
        """Rounded to float64."""
        return self.value if self.tail is None else self.value + self.tail

    def of(self, group: slice) -> Mean:
        """The means of a few of the sequences."""
        return Mean(self.value[group], None if self.tail is None else self.tail[group])


@dataclass
class TokenPiece:
    """A few tokens of a few sequences, and a scratch buffer of the same shape; both may be written to."""

    group: slice
    rows: slice
    X: Float[Tensor, "group rows dim"]
    spare: Float[Tensor, "group rows dim"]
    mean: Mean
    valid_bits: Int[Tensor, "group rows 1"] | None
    is_large: bool

    @property
    def is_first(self) -> bool:
        """Whether it has the first tokens of its sequences."""
        return bool(self.rows.start == 0)

    def centre_(self) -> Tensor:
        """Turn X into CX, in place."""
        return centre_(self.X, self.mean, self.valid_bits)


def centre_(X: Tensor, mean: Mean, valid_bits: Tensor | None) -> Tensor:
    """Turn X into CX, in place; dropped tokens stay zero."""
    X.sub_(mean.value)
    if mean.tail is not None:
        X.sub_(mean.tail)
    return clear_(X, valid_bits)


def clear_(X: Tensor, valid_bits: Tensor | None) -> Tensor:
    """Set dropped tokens to zero, in place, even if they are NaN.

    The bitwise AND is several times as fast as ``masked_fill_`` on a CPU.
    """
    if valid_bits is not None:
        X.view(torch.int64).bitwise_and_(valid_bits)
    return X


def fitting(room: Tensor, x: Tensor) -> Tensor:
    """The part of ``room`` that has the shape of ``x``."""
    return room if room.shape == x.shape else room[: x.shape[0], : x.shape[1]]


def walk(tokens: Tokens) -> Iterator[TokenPiece]:
    """Every piece of X, with the mean of its sequences; only sequences with several pieces are read twice.

    There is always at least one piece, possibly empty. Pieces share memory: finish with one before the next.
    """
    room, spare = tokens.room(), tokens.room()
    strips = list(tokens.strips()) or [slice(0, 0)]
    n = tokens.count.clamp_min(1.0)[:, None, None]
    for group in list(tokens.groups()) or [slice(0, 0)]:
        read = _reader(tokens, group, strips, room)
        mean = _mean(tokens, group, read, spare, n[group])
        for rows, X in read():
            yield TokenPiece(group, rows, X, fitting(spare, X), mean, tokens.valid_bits(group, rows), tokens.are_large)


def join_rows(tokens: Tokens, parts: list[Tensor]) -> Float[Tensor, "sequences tokens"]:
    """Concatenate one number per token from the pieces of a walk: whole sequences, or strips of one sequence."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, -1 if _strips(tokens) > 1 else 0)
    return whole.reshape(tokens.sequences, tokens.tokens)


def add_columns(tokens: Tokens, parts: list[Tensor]) -> Float[Tensor, "sequences ..."]:
    """Sums over all tokens of a sequence, from the sums over the pieces of a walk."""
    if len(parts) == 1:
        return parts[0]
    sums = torch.cat(parts)
    return sums.view(tokens.sequences, _strips(tokens), *sums.shape[1:]).sum(1)


def _strips(tokens: Tokens) -> int:
    return max(1, len(list(tokens.strips())))


def _reader(tokens: Tokens, group: slice, strips: list[slice], room: Tensor) -> Reader:
    """A function that iterates over the pieces of a group; a single piece is read only once."""
    if len(strips) == 1:
        held = [(strips[0], tokens.piece(group, strips[0], room))]
        return lambda: held
    return lambda: ((rows, tokens.piece(group, rows, room)) for rows in strips)


def _mean(tokens: Tokens, group: slice, read: Reader, spare: Tensor, n: Tensor) -> Mean:
    mean = _total(_column_sum(X, tokens.are_large) for _, X in read()).div_(n)
    if not is_wide(tokens.dtype):
        return Mean(mean, None)
    # The mean of X - mean is the rounding error of the mean: a second pass recovers the digits lost in the first.
    deviations = (
        clear_(torch.sub(X, mean, out=fitting(spare, X)), tokens.valid_bits(group, rows)).sum(-2, keepdim=True)
        for rows, X in read()
    )
    return Mean(mean, _total(deviations).div_(n))


def _total(parts: Iterable[Tensor]) -> Tensor:
    first, *others = parts
    for other in others:
        first.add_(other)
    return first


# A sum of squares below this has lost digits to underflow. Only float64 tokens can be this small without being zero.
_LEAST_ENERGY = 2.0**-960


@dataclass(frozen=True)
class Energies:
    """Sums of squares of X and of CX along rows and columns.

    Columns of CX are summed in the same walk only on an accelerator, where the host does not learn whether they are
    needed; see :meth:`Tokens.is_resolved`.
    """

    row: Float[Tensor, "sequences tokens"]
    centred_row: Float[Tensor, "sequences tokens"]
    channel: Float[Tensor, "sequences dim"]
    centred_channel: Float[Tensor, "sequences dim"] | None


@dataclass(frozen=True)
class LinearSums:
    """Sums of absolute values of X and of CX along columns and rows, and sums of their rows scaled to unit length.

    The largest column and row sums are the 1- and the inf-norm. Zero rows have no direction and add nothing.
    """

    column: Float[Tensor, "sequences dim"]
    row: Float[Tensor, "sequences tokens"]
    direction: Float[Tensor, "sequences dim"]
    centred_column: Float[Tensor, "sequences dim"]
    centred_row: Float[Tensor, "sequences tokens"]
    centred_direction: Float[Tensor, "sequences dim"]


@dataclass(frozen=True)
class NormSums:
    """All sums together, from one walk: a second walk would have to read and centre X again."""

    mean: Mean
    energies: Energies
    linear: LinearSums


@dataclass(frozen=True)
class ColumnRanges:
    """Per column: half the distance between its extremes, and the larger of them in absolute value."""

    half_width: Float[Tensor, "sequences dim"]
    largest_entry: Float[Tensor, "sequences dim"]


def largest(values: Float[Tensor, "sequences width"]) -> Float[Tensor, " sequences"]:
    """The largest value along the last axis; NaN if the axis is empty."""
    if values.shape[-1] == 0:
        return values.sum(-1) * torch.nan
    return values.amax(-1)


def norm_sums(tokens: Tokens) -> NormSums:
    """Mean, sums of squares, of absolute values and of directions."""
    # The first piece of a sequence writes its sums; without tokens there is none, and the sums are zero.
    is_empty = tokens.sequences * tokens.tokens == 0
    fresh = torch.zeros if is_empty else torch.empty
    row = fresh(4, tokens.sequences, tokens.tokens, 1, dtype=torch.float64, device=tokens.device)
    column = fresh(6, tokens.sequences, 1, tokens.dim, dtype=torch.float64, device=tokens.device)
    means: list[Mean] = []
    for piece in walk(tokens):
        if piece.is_first:
            means.append(piece.mean)
        if is_empty:
            continue
        of_rows = _RowSums(*row[:, piece.group, piece.rows].unbind())
        _sum_piece(piece, of_rows, _ColumnSums(*column[:, piece.group].unbind()))
    values, tails = zip(*means, strict=True)
    mean = means[0] if len(means) == 1 else Mean(torch.cat(values), None if tails[0] is None else torch.cat(tails))
    rows, columns = _RowSums(*row.squeeze(-1).unbind()), _ColumnSums(*column.squeeze(-2).unbind())
    on_cpu = tokens.device.type == "cpu"
    energies = Energies(rows.energy, rows.centred_energy, columns.energy, None if on_cpu else columns.centred_energy)
    linear = LinearSums(
        column=columns.size,
        row=rows.size,
        direction=columns.direction,
        centred_column=columns.centred_size,
        centred_row=rows.centred_size,
        centred_direction=columns.centred_direction,
    )
    return NormSums(mean, energies, linear)


class _RowSums(NamedTuple):
    energy: Tensor
    size: Tensor
    centred_energy: Tensor
    centred_size: Tensor


class _ColumnSums(NamedTuple):
    energy: Tensor
    size: Tensor
    direction: Tensor
    centred_energy: Tensor  # only on an accelerator
    centred_size: Tensor
    centred_direction: Tensor


def _sum_piece(piece: TokenPiece, row: _RowSums, column: _ColumnSums) -> None:
    """Write the sums of the rows of a piece, and add its sums of columns."""
    X, wide, first = piece.X, piece.mean.tail is not None, piece.is_first
    # ``spare`` holds X², then |X|; after that X itself is overwritten by CX and |CX|. No fresh memory per piece.
    S = torch.mul(X, X, out=piece.spare)
    _sum_rows(S, piece, row.energy)
    _add_columns(column.energy, S, piece)
    _add_directions(column.direction, X, row.energy, wide=wide, first=first)
    A = torch.abs(X, out=piece.spare)
    _sum_rows(A, piece, row.size)
    _add_columns(column.size, A, piece)
    C = piece.centre_()
    torch.linalg.vector_norm(C, dim=-1, keepdim=True, out=row.centred_energy).square_()
    _add_directions(column.centred_direction, C, row.centred_energy, wide=wide, first=first)
    if C.device.type != "cpu":
        if first:
            torch.linalg.vector_norm(C, dim=-2, keepdim=True, out=column.centred_energy).square_()
        else:
            column.centred_energy.add_(torch.linalg.vector_norm(C, dim=-2, keepdim=True).square_())
    C.abs_()
    _sum_rows(C, piece, row.centred_size)
    _add_columns(column.centred_size, C, piece)


def _column_sum(X: Float[Tensor, "group rows dim"], large: bool, out: Tensor | None = None) -> Tensor:
    """Sum of the rows. Of a large matrix, on a CPU, a product with ones takes half of the time of ``sum``."""
    if large:
        return torch.bmm(X.new_ones(len(X), 1, X.shape[1]), X, out=out)
    return torch.sum(X, -2, keepdim=True, out=out)


def _add_columns(total: Tensor, X: Tensor, piece: TokenPiece) -> None:
    if piece.is_first:
        _column_sum(X, piece.is_large, out=total)
    else:
        total.add_(_column_sum(X, piece.is_large))


def _sum_rows(X: Tensor, piece: TokenPiece, total: Float[Tensor, "group rows 1"]) -> None:
    if piece.is_large:
        torch.bmm(X, X.new_ones(len(X), X.shape[2], 1), out=total)
    else:
        torch.sum(X, -1, keepdim=True, out=total)


def _shares(energy: Tensor) -> Tensor:
    """One over the energy of each row; with this weight a zero row, of a narrow format, adds nothing."""
    return energy.clamp_min(_LEAST_ENERGY).reciprocal_()


def column_ranges(tokens: Tokens) -> ColumnRanges:
    """Extremes of each column."""
    least, most = tokens.zeros(tokens.dim) + torch.inf, tokens.zeros(tokens.dim) - torch.inf
    for group, rows in tokens.pieces():
        X = tokens.piece(group, rows)
        drop = tokens.dropped(group, rows)
        low, high = (X, X) if drop is None else (X.masked_fill(drop, torch.inf), X.masked_fill(drop, -torch.inf))
        least[group] = torch.minimum(least[group], low.amin(-2))
        most[group] = torch.maximum(most[group], high.amax(-2))
    return ColumnRanges(half_width=(most - least) / 2, largest_entry=torch.maximum(most, -least))


def column_median_deviation(tokens: Tokens) -> Float[Tensor, "sequences dim"]:
    """Sum of the distances from the column median; for an even count, all medians give the same sum."""
    if tokens.tokens == 0:
        return tokens.zeros(tokens.dim)
    middle = ((tokens.count - 1) / 2).floor().clamp_min(0.0).long()
    found = tokens.zeros(tokens.dim)
    for group in tokens.groups():
        drop = tokens.dropped(group, slice(None))
        for channels in tokens.slabs(group):
            X = tokens.slab(group, channels)
            if drop is None:
                median = X.median(-2, keepdim=True).values
            else:
                ordered = X.masked_fill(drop, torch.inf).sort(-2).values
                median = ordered.gather(-2, middle[group, None, None].expand(-1, 1, X.shape[-1]))
            distance = (X - median).abs_()
            found[group, channels] = (distance if drop is None else distance.masked_fill_(drop, 0.0)).sum(-2)
    return found


def _add_directions(total: Tensor, X: Tensor, row_energy: Tensor, *, wide: bool, first: bool) -> None:
    """Add the rows of X, scaled to unit length; zero rows have no direction."""
    weight = row_energy.clamp_min(_LEAST_ENERGY).rsqrt_()
    tiny = row_energy < _LEAST_ENERGY if wide else None
    if tiny is not None:
        weight.masked_fill_(tiny, 0.0)
    if first:
        torch.bmm(weight.mT, X, out=total)
    else:
        total.baddbmm_(weight.mT, X)
    # Rows whose squares underflow still have a direction: rescale them by a power of two before normalising.
    if tiny is not None and may_hold(tiny):
        rows = torch.where(tiny, X, 0.0)
        rows = rows / power_of_two_below(rows.abs().amax(-1, keepdim=True))
        # A zero row is 0/0 here and has no direction.
        unit = (rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True)).nan_to_num_(nan=0.0)
        total += unit.sum(-2, keepdim=True)


def unit_energy(tokens: Tokens) -> Float[Tensor, "sequences dim"]:
    """Sums of squares along the columns, each row in units of its own energy; a zero row adds nothing."""
    found, room = tokens.zeros(1, tokens.dim), tokens.room()
    share = _shares(tokens.energies.row).unsqueeze(-2)
    for group, rows in tokens.pieces():
        found[group].baddbmm_(share[group, :, rows], tokens.piece(group, rows, room).square_())
    return found.squeeze(-2)


def is_resolved(tokens: Tokens, floor: float) -> Bool[Tensor, " sequences"]:
    """Whether tokens differ by more than rounding in some outlier channel, or in the other channels together."""
    deviation, energy = tokens.energies.centred_channel, tokens.energies.channel
    if deviation is None:
        deviation, room = tokens.zeros(tokens.dim), tokens.room()
        for group, rows in tokens.pieces():
            deviation[group] += tokens.centred_piece(group, rows, room).square_().sum(-2)
    outlier = energy > outlier_energy(energy)
    alone = outlier & (deviation > floor**2 * energy)
    rest = [part.masked_fill(outlier, 0.0).sum(-1) for part in (deviation, energy)]
    return alone.any(-1) | (torch.sqrt(rest[0]) > floor * torch.sqrt(rest[1]))


_CACHED_ENTRIES = 1 << 22
_CACHED_DEVICE_ENTRIES = 1 << 23


class Grams(NamedTuple):
    """Gram matrices of X and of CX; zero if entries are not finite, so that LAPACK terminates."""

    plain: Float[Tensor, "sequences side side"]
    centred: Float[Tensor, "sequences side side"]


@dataclass(frozen=True)
class GramBlock:
    """Gram matrices of a few sequences."""

    group: slice
    plain: Float[Tensor, "group side side"]
    centred: Float[Tensor, "group side side"]


@dataclass(frozen=True)
class GramEnergies:
    r"""Squared Frobenius norms of the Gram matrices, :math:`\sum_i s_i^4`."""

    plain: Float[Tensor, " sequences"]
    centred: Float[Tensor, " sequences"]


def gram_energies(tokens: Tokens) -> GramEnergies:
    """Sums of fourth powers of singular values."""
    plain, centred = tokens.zeros(), tokens.zeros()
    for block in _blocks(tokens):
        plain[block.group] = block.plain.square().sum((-2, -1))
        centred[block.group] = block.centred.square().sum((-2, -1))
    return GramEnergies(plain, centred)


def singular_values(tokens: Tokens, *, centred: bool) -> Float[Tensor, "sequences side"]:
    """Singular values of X or of CX, largest first."""
    rank = tokens.rank_limit(centred=centred)
    found = tokens.zeros(max(1, _side(tokens)))
    if tokens.tokens == 0:
        return found
    for block in _blocks(tokens):
        values = _eigenvalues(tokens, block, centred=centred).sqrt()
        found[block.group] = spectrum.without_structural_zeros(values, rank[block.group])
    if is_wide(tokens.dtype):
        lost = spectrum.is_lost_in_gram(found, rank) & tokens.finite
        for i in lost.nonzero().flatten().tolist():
            group = slice(i, i + 1)
            values = spectrum.direct_singular_values(_same_spectrum(tokens, group, centred=centred), otherwise=found[i])
            found[group] = spectrum.without_structural_zeros(values.unsqueeze(0), rank[group])
    return found


def _eigenvalues(tokens: Tokens, block: GramBlock, *, centred: bool) -> Float[Tensor, "group side"]:
    if _leave_threads_idle(tokens):
        return tokens._both_eigenvalues[block.group.stop :] if centred else tokens._both_eigenvalues[block.group]
    return spectrum.gram_eigenvalues(block.centred if centred else block.plain)


def _leave_threads_idle(tokens: Tokens) -> bool:
    """Whether there are threads for the other spectrum too: then X and CX are solved at the same time."""
    on_cpu = tokens.device.type == "cpu"
    divided = spectrum.are_divided(2 * tokens.sequences, _side(tokens))
    return on_cpu and _is_cached(tokens) and divided and tokens.sequences < available_threads()


def _same_spectrum(tokens: Tokens, group: slice, *, centred: bool) -> Tensor:
    """X or CX of one sequence, or for a long one its triangular factor, which has the same singular values."""
    read = tokens.centred_piece if centred else tokens.piece
    if not is_tall(tokens.tokens, tokens.dim):
        return read(group, slice(None))[0]
    return triangular_factor(read(group, rows)[0] for rows in chunks(tokens.tokens, tokens.dim))


def gram_blocks(tokens: Tokens) -> Iterator[GramBlock]:
    """Gram matrices, a few sequences at a time."""
    by_tokens = tokens.tokens <= tokens.dim
    build, room = (_token_side, tokens.group_room()) if by_tokens else (_channel_side, tokens.room())
    for group in tokens.groups():
        yield _finite(tokens, GramBlock(group, *build(tokens, group, room)))


def all_grams(tokens: Tokens) -> Grams:
    """Gram matrices of all sequences: operations on many small matrices cost less than on one at a time."""
    blocks = list(gram_blocks(tokens))
    if len(blocks) == 1:
        return Grams(blocks[0].plain, blocks[0].centred)
    none = tokens.zeros(_side(tokens), _side(tokens))[:0]
    return Grams(torch.cat([none, *(b.plain for b in blocks)]), torch.cat([none, *(b.centred for b in blocks)]))


def _finite(tokens: Tokens, block: GramBlock) -> GramBlock:
    """The same block, with zero for sequences that are not finite."""
    broken = ~tokens.finite[block.group, None, None]
    if may_hold(broken):
        block.plain.masked_fill_(broken, 0.0)
        block.centred.masked_fill_(broken, 0.0)
    return block


def _is_cached(tokens: Tokens) -> bool:
    most = _CACHED_ENTRIES if tokens.device.type == "cpu" else _CACHED_DEVICE_ENTRIES
    return tokens.sequences * _side(tokens) ** 2 <= most


def _blocks(tokens: Tokens) -> Iterable[GramBlock]:
    return [GramBlock(slice(0, tokens.sequences), *tokens.cached_grams)] if _is_cached(tokens) else gram_blocks(tokens)


def _side(tokens: Tokens) -> int:
    return min(tokens.tokens, tokens.dim)


def _token_side(tokens: Tokens, group: slice, room: Tensor) -> tuple[Tensor, Tensor]:
    C = tokens.centred_piece(group, slice(None), room)
    centred = C @ C.mT
    return _plain(tokens, group, centred, C @ tokens.mean[group].unsqueeze(-1)), centred


def _plain(tokens: Tokens, group: slice, centred: Tensor, a: Tensor) -> Tensor:
    """XX^T = (CX)(CX)^T + a 1^T + 1 a^T + |m|^2 11^T, with a = CX m."""
    # Not a product, whose bits depend on whether there is another sequence.
    square = tokens.mean[group].square().sum(-1)[:, None, None]
    plain = (a + a.mT).add_(square).add_(centred)
    drop = tokens.dropped(group, slice(None))
    return plain if drop is None else plain.masked_fill_(drop | drop.mT, 0.0)


def _channel_side(tokens: Tokens, group: slice, room: Tensor) -> tuple[Tensor, Tensor]:
    mean = tokens.mean[group].unsqueeze(-1)
    centred = torch.zeros(mean.shape[0], tokens.dim, tokens.dim, dtype=torch.float64, device=tokens.device)
    for rows in tokens.strips():
        C = tokens.centred_piece(group, rows, room)
        centred.baddbmm_(C.mT, C)
    # X^TX = (CX)^T(CX) + n m m^T.
    return torch.baddbmm(centred, mean * tokens.count[group, None, None], mean.mT), centred


_DEVICE_GROUP_ENTRIES = 1 << 24


def pairs(tokens: Tokens) -> Pairs:
    """Statistics of the distances between all pairs, computed a few sequences at a time."""
    if tokens.tokens == 0:
        return Pairs(*(tokens.zeros() * math.nan for _ in range(5)))
    if tokens.sequences == 0:
        return Pairs(*(tokens.zeros() for _ in range(5)))
    if tokens.device.type == "cpu" and tokens.tokens <= min(tokens.dim, MOST_TOKENS) and not is_wide(tokens.dtype):
        parts = [tuple(_of_grams(tokens, block)) for block in _several(_blocks(tokens))]
    elif tokens.device.type == "cpu":
        parts = [_of_group(tokens, group) for group in _pair_groups(tokens)]
    else:
        parts = [pair_statistics(*tokens.pair_distances)]
    # X = 0 has no relative distances. NaN must be excluded explicitly: comparisons with it find no copies.
    lost = ~((tokens.energies.row.sum(-1) > 0) & tokens.finite)
    if is_wide(tokens.dtype):
        # If another token is 2^1022 times as large, a token underflows to zero in units of the scale.
        lost |= (tokens.linear_sums.row > 0).sum(-1) != tokens.directed
    return Pairs(*(torch.cat(column).masked_fill_(lost, math.nan) for column in zip(*parts, strict=True)))


def pair_distances(tokens: Tokens) -> PairDistances:
    """From differences, which do not cancel: one kernel, where products would need a second look at close tokens."""
    found = [_units(tokens, group) for group in _pair_groups(tokens)]
    V, length, known = zip(*found, strict=True)
    apart = [torch.cdist(units, units, compute_mode="donot_use_mm_for_euclid_dist").square_() for units in V]
    return PairDistances(torch.cat(apart), torch.cat(length), None if known[0] is None else torch.cat(known))


def _pair_groups(tokens: Tokens) -> list[slice]:
    """A few sequences at a time, so that a float64 copy of their tokens stays in the cache of a CPU."""
    size = min(tokens.tokens, MOST_TOKENS)
    if tokens.device.type == "cpu":
        return list(tiles.groups(tokens.sequences, size, max(size, tokens.dim), tokens.device))
    step = max(1, _DEVICE_GROUP_ENTRIES // (size * max(size, tokens.dim)))
    return [slice(start, min(start + step, tokens.sequences)) for start in range(0, tokens.sequences, step)]


def _units(tokens: Tokens, group: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """Unit vectors and lengths of a sample of tokens without outlier channels, and which places hold a token."""
    X, known = tokens.sample(group, min(tokens.tokens, MOST_TOKENS))
    return *without_outliers(X, wide=is_wide(tokens.dtype)), known


def _of_group(tokens: Tokens, group: slice) -> tuple[Tensor, ...]:
    V, length, known = _units(tokens, group)
    return pair_statistics(squared_distances(V, (length > 0).to(length.dtype)), length, known, V)


def _several(blocks: Iterable[GramBlock]) -> Iterator[GramBlock]:
    """Parts of the blocks whose Gram matrices stay in cache."""
    for block in blocks:
        count, side, _ = block.centred.shape
        for part in tiles.groups(count, side, side, block.centred.device):
            group = slice(block.group.start + part.start, block.group.start + part.stop)
            yield GramBlock(group, block.plain[part], block.centred[part])


def _of_grams(tokens: Tokens, block: GramBlock) -> list[Tensor]:
    """From the Gram matrices of CX; again from unit vectors for sequences that need it."""
    group = block.group
    known = None if tokens.dropped(group, slice(None)) is None else tokens.valid[group]
    fields, sure = centred_pair_statistics(*_products(tokens, block), known)
    found = list(fields)
    for i in (~sure).nonzero().flatten().tolist():
        # Not alone if there are others: a product of a single matrix rounds differently.
        first = max(0, min(group.start + i, tokens.sequences - 2))
        some = _of_group(tokens, slice(first, min(first + 2, tokens.sequences)))
        for column, values in zip(found, some, strict=True):
            column[i] = values[group.start + i - first]
    return found


def _products(tokens: Tokens, block: GramBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Products of CX and energies of X after scaling down outlier channels, and the diagonal before that."""
    group = block.group
    products, energy, diagonal = block.centred, tokens.energies.row[group], block.centred.diagonal(0, -2, -1)
    unit_energy = tokens.unit_energy[group]
    weight = (outlier_energy(unit_energy) / unit_energy).clamp_(max=1.0).nan_to_num_(nan=1.0)
    with_outliers = (weight < 1.0).any(-1)
    if not bool(with_outliers.any()):
        return products, energy, diagonal
    products, energy = products.clone(), energy.clone()
    size = len(products), tokens.tokens, tokens.dim, tokens.device
    room, spare = tiles.group_room(*size), tiles.group_room(*size)
    for here in tiles.groups(*size):
        if bool(with_outliers[here].any()):
            some = slice(group.start + here.start, group.start + here.stop)
            _weigh(tokens, some, weight[here], products[here], energy[here], room, spare)
    return products, energy, diagonal


def _weigh(
    tokens: Tokens, group: slice, weight: Tensor, products: Tensor, energy: Tensor, room: Tensor, spare: Tensor
) -> None:
    """Scale down outlier channels: they are few, so what they contribute to the Gram matrix is subtracted."""
    X, rows = tokens.piece(group, slice(None), room), slice(None)
    channels = (weight < 1.0).any(0).nonzero().flatten()
    squares = torch.mul(X, X, out=fitting(spare, X))
    energy.copy_((squares @ weight.unsqueeze(-1)).squeeze(-1))
    mean = Mean(tokens.mean[group].unsqueeze(-2)[..., channels], None)
    C = centre_(X[..., channels], mean, tokens.valid_bits(group, rows))
    C.mul_((1.0 - weight[:, channels]).sqrt_().unsqueeze(-2))
    products.baddbmm_(C, C.mT, alpha=-1.0)
