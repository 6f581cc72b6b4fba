"""The tokens of a batch of sequences, and the float64 reductions every token metric is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankscope._errors import InputError
from rankscope.linalg import centring, grams, reductions, tiles
from rankscope.linalg.precision import float64_home, is_wide, power_of_two_below

_SLAB_ENTRIES = 1 << 21


class Tokens:
    """Tokens ``x`` of shape ``(*batch, tokens, dim)``, seen as one matrix X per sequence.

    Every reduction is taken in float64 on the device of ``x``, piece by piece, on first use, and kept: metrics given
    the same ``Tokens`` share them. ``x`` itself is neither copied nor changed. All reductions have one leading
    ``sequences`` axis, the batch axes flattened, and are in units of :attr:`scale`.

    Args:
        x: any floating dtype.
        keep: which tokens count, ``(*batch, tokens)``; padding and special tokens are taken out as if they had never
            been there, so sequences may differ in length. Leave it out when every token counts: it is faster.

    Raises:
        InputError: ``x`` is no floating tensor with at least two axes, or ``keep`` does not fit it.
    """

    def __init__(
        self, x: Float[Tensor, "*batch tokens dim"], keep: Bool[Tensor, "*batch tokens"] | None = None
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
        self.batch_shape = tuple(x.shape[:-2])
        self.device = float64_home(x)
        self.dtype = x.dtype
        sequences = math.prod(self.batch_shape)  # not -1, which is ambiguous without tokens
        self._x = x.detach().reshape(sequences, *x.shape[-2:]) if x.ndim != 3 else x.detach()
        self.sequences, self.tokens, self.dim = self._x.shape
        self.fewest = self.tokens if keep is None else 0
        self._drop = None if keep is None else ~keep.detach().to(self.device).reshape(-1, self.tokens)

    @cached_property
    def count(self) -> Float[Tensor, " sequences"]:
        """Number n of tokens that count."""
        if self._drop is None:
            return torch.full((self.sequences,), float(self.tokens), dtype=torch.float64, device=self.device)
        return (~self._drop).sum(-1).double()

    @cached_property
    def scale(self) -> Float[Tensor, " sequences"]:
        """The power of two X is divided by: near its largest entry for float64, whose squares may overflow, else 1."""
        largest = self.zeros()
        if is_wide(self.dtype):
            room = self.room()
            for group, rows in self.pieces():
                X = self._read(group, rows, room).abs_()
                largest[group] = torch.maximum(largest[group], X.amax((-2, -1)))
        return power_of_two_below(largest)

    @cached_property
    def mean(self) -> Float[Tensor, "sequences dim"]:
        """Mean token."""
        value, tail = self._norm_sums.mean
        return (value if tail is None else value + tail).squeeze(-2)

    @cached_property
    def finite(self) -> Bool[Tensor, " sequences"]:
        """Whether every entry that counts is a finite number."""
        return torch.isfinite(self.energies.row.sum(-1))

    @cached_property
    def directed(self) -> Float[Tensor, " sequences"]:
        """Number of tokens that are not zero, and so have a direction."""
        nonzero = (self._x != 0).any(-1).to(self.device)
        return (nonzero if self._drop is None else nonzero & ~self._drop).sum(-1).double()

    @cached_property
    def relative_deviation(self) -> Float[Tensor, " sequences"]:
        r""":math:`\|CX\|_F / \|X\|_F`, against which the float floor is held."""
        return (self.energies.centred_row.sum(-1) / self.energies.row.sum(-1)).sqrt()

    @property
    def energies(self) -> reductions.Energies:
        """Sums of squares along rows and columns."""
        return self._norm_sums.energies

    @property
    def linear_sums(self) -> reductions.LinearSums:
        """Sums of absolute values along rows and columns, and of directions."""
        return self._norm_sums.linear

    @cached_property
    def column_ranges(self) -> reductions.ColumnRanges:
        """Extremes of each column."""
        return reductions.column_ranges(self)

    @cached_property
    def column_median_deviation(self) -> Float[Tensor, "sequences dim"]:
        """Sum over each column of the distances from its median."""
        return reductions.column_median_deviation(self)

    @cached_property
    def gram_energies(self) -> grams.GramEnergies:
        """Sums of fourth powers of the singular values of X and of CX, without computing any of them."""
        return grams.gram_energies(self)

    @cached_property
    def singular_values(self) -> Float[Tensor, "sequences side"]:
        """Singular values of X, largest first, zero beyond the rank its shape allows."""
        return grams.singular_values(self, centred=False)

    @cached_property
    def centred_singular_values(self) -> Float[Tensor, "sequences side"]:
        """Singular values of CX, largest first, zero beyond the rank its shape allows."""
        return grams.singular_values(self, centred=True)

    @cached_property
    def kept_grams(self) -> list[grams.GramBlock]:
        """Gram matrices, kept only where they are small."""
        return list(grams.gram_blocks(self))

    def rank_limit(self, *, centred: bool) -> Float[Tensor, " sequences"]:
        """The largest rank the shape of X allows, or that of CX, which has lost one token."""
        return (self.count - float(centred)).clamp(0.0, float(self.dim))

    def zeros(self, *width: int) -> Float[Tensor, "sequences ..."]:
        """A place to gather one number, or one vector, per sequence."""
        return torch.zeros(self.sequences, *width, dtype=torch.float64, device=self.device)

    def groups(self) -> Iterator[slice]:
        """The sequences, a few at a time."""
        return tiles.groups(self.sequences, self.tokens, self.dim, self.device)

    def strips(self) -> Iterator[slice]:
        """The tokens of long sequences, a few at a time."""
        return tiles.strips(self.tokens, self.dim, self.device)

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        """The sequences, a few at a time, and of long ones a few tokens at a time."""
        for group in self.groups():
            for rows in self.strips():
                yield group, rows

    def room(self) -> Tensor:
        """Memory for one piece, whichever it is."""
        return tiles.piece_room(self.sequences, self.tokens, self.dim, self.device)

    def group_room(self) -> Tensor:
        """Memory for all tokens of a group of sequences."""
        return tiles.group_room(self.sequences, self.tokens, self.dim, self.device)

    def piece(self, group: slice, rows: slice, room: Tensor | None = None) -> Tensor:
        """One piece of X in float64 and in units of the scale, zero where tokens are dropped.

        It lies in ``room``, until the next piece is put there, or in memory of its own; either may be written to.
        """
        X = self._read(group, rows, room)
        return X.div_(self.scale[group, None, None]) if is_wide(self.dtype) else X

    def centred_piece(self, group: slice, rows: slice, room: Tensor | None = None) -> Tensor:
        """The same piece of CX."""
        X = self.piece(group, rows, room)
        return centring.centre_(X, self._norm_sums.mean.of(group), self.kept_bits(group, rows))

    def slabs(self, group: slice) -> Iterator[slice]:
        """The channels, a few at a time, of all tokens of a group: for what needs whole columns."""
        width = max(1, _SLAB_ENTRIES // max(1, (group.stop - group.start) * self.tokens))
        return (slice(start, min(self.dim, start + width)) for start in range(0, self.dim, width))

    def slab(self, group: slice, channels: slice) -> Tensor:
        """A few channels of X in float64 and in units of the scale, zero where tokens are dropped."""
        x = self._x[group, :, channels]
        X = torch.empty(x.shape, dtype=torch.float64, device=self.device).copy_(x)
        centring.clear_(X, self.kept_bits(group, slice(None)))
        return X.div_(self.scale[group, None, None]) if is_wide(self.dtype) else X

    def entries(self, channel: Int[Tensor, "sequences tokens"]) -> Float[Tensor, "sequences tokens"]:
        """One entry of each token, dropped tokens too, in the units of ``x``."""
        place = channel.unsqueeze(-1).to(self._x.device)
        return self._x.gather(-1, place).squeeze(-1).to(self.device).double()

    def dropped(self, group: slice, rows: slice) -> Bool[Tensor, "group rows 1"] | None:
        """Which tokens of the piece do not count."""
        return None if self._drop is None else self._drop[group, rows].unsqueeze(-1)

    def kept_bits(self, group: slice, rows: slice) -> Int[Tensor, "group rows 1"] | None:
        """All bits set for tokens of the piece that count, none for the others."""
        return None if self._kept_bits is None else self._kept_bits[group, rows]

    @cached_property
    def _norm_sums(self) -> reductions.NormSums:
        return reductions.norm_sums(self)

    @cached_property
    def _kept_bits(self) -> Tensor | None:
        return None if self._drop is None else self._drop.long().sub_(1).unsqueeze(-1)

    def _read(self, group: slice, rows: slice, room: Tensor | None) -> Tensor:
        x = self._x[group, rows]
        X = torch.empty(x.shape, dtype=torch.float64, device=self.device) if room is None else centring.fitting(room, x)
        return centring.clear_(X.copy_(x), self.kept_bits(group, rows))
