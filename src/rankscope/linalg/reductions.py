"""What the norm-type metrics need of X and of CX, gathered piece by piece; nothing of size tokens x dim is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.linalg import centring
from rankscope.linalg.centring import Mean, Piece
from rankscope.linalg.precision import power_of_two_below

if TYPE_CHECKING:
    from rankscope.linalg.tokens import Tokens


# A sum of squares below this has lost digits to underflow. Only float64 tokens can be so small and not be zero.
_LEAST_ENERGY = 2.0**-960


@dataclass(frozen=True)
class Energies:
    """Sums of squares of X along rows and columns and of CX along rows."""

    row: Float[Tensor, "sequences tokens"]
    centred_row: Float[Tensor, "sequences tokens"]
    channel: Float[Tensor, "sequences dim"]


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
    """All sums together, from one walk: a second one would have to read X and centre it again."""

    mean: Mean
    energies: Energies
    linear: LinearSums


@dataclass(frozen=True)
class ColumnRanges:
    """Per column: half the distance between its extremes, and the larger of them in absolute value."""

    half_width: Float[Tensor, "sequences dim"]
    largest_entry: Float[Tensor, "sequences dim"]


def largest(values: Float[Tensor, "sequences width"]) -> Float[Tensor, " sequences"]:
    """The largest along the last axis, NaN where there is none."""
    if values.shape[-1] == 0:
        return values.sum(-1) * torch.nan
    return values.amax(-1)


def norm_sums(tokens: Tokens) -> NormSums:
    """Mean, sums of squares, of absolute values and of directions."""
    parts = [_sums_of_piece(piece) for piece in centring.walk(tokens)]
    energies, linear = [part.energies for part in parts], [part.linear for part in parts]
    return NormSums(
        centring.join_means(tokens, [part.mean for part in parts]),
        Energies(
            row=centring.join_rows(tokens, [e.row for e in energies]),
            centred_row=centring.join_rows(tokens, [e.centred_row for e in energies]),
            channel=centring.add_columns(tokens, [e.channel for e in energies]),
        ),
        LinearSums(
            column=centring.add_columns(tokens, [s.column for s in linear]),
            row=centring.join_rows(tokens, [s.row for s in linear]),
            direction=centring.add_columns(tokens, [s.direction for s in linear]),
            centred_column=centring.add_columns(tokens, [s.centred_column for s in linear]),
            centred_row=centring.join_rows(tokens, [s.centred_row for s in linear]),
            centred_direction=centring.add_columns(tokens, [s.centred_direction for s in linear]),
        ),
    )


def _sums_of_piece(piece: Piece) -> NormSums:
    X = piece.X
    S = torch.mul(X, X, out=piece.spare)
    row_energy, channel = S.sum(-1), S.sum(-2)
    wide = piece.mean.tail is not None
    direction = _sum_of_directions(X, row_energy, wide=wide)
    A = torch.abs(X, out=piece.spare)
    column, row = A.sum(-2), A.sum(-1)
    C = piece.centre_()
    centred_row_energy = torch.linalg.vector_norm(C, dim=-1).square_()
    centred_direction = _sum_of_directions(C, centred_row_energy, wide=wide)
    C.abs_()
    return NormSums(
        piece.mean,
        Energies(row_energy, centred_row_energy, channel),
        LinearSums(column, row, direction, C.sum(-2), C.sum(-1), centred_direction),
    )


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
    """Distances from the column median, summed; an even count has many medians, all with the same sum."""
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


def _sum_of_directions(X: Tensor, row_energy: Tensor, *, wide: bool) -> Tensor:
    tiny = row_energy < _LEAST_ENERGY
    weight = row_energy.rsqrt().masked_fill_(tiny, 0.0)
    total = torch.bmm(weight.unsqueeze(-2), X).squeeze(-2)
    if wide and bool(tiny.any()):
        rows = torch.where(tiny.unsqueeze(-1), X, 0.0)
        rows = rows / power_of_two_below(rows.abs().amax(-1, keepdim=True))
        # A zero row is 0/0 here and has no direction.
        total += (rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True)).nan_to_num_(nan=0.0).sum(-2)
    return total
