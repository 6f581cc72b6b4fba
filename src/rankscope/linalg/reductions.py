"""What the norm-type metrics need of X and of CX, gathered piece by piece; nothing of size tokens x dim is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.linalg.precision import is_wide

if TYPE_CHECKING:
    from rankscope.linalg.tokens import Tokens


@dataclass(frozen=True)
class Energies:
    """The mean token, and sums of squares along rows of X and of CX: what tokens and attention matrices both need.

    ``mean_tail`` is what rounding the mean to float64 left out: near collapse of float64 tokens CX would show it.
    """

    mean: Float[Tensor, "sequences dim"]
    mean_tail: Float[Tensor, "sequences dim"] | None
    row: Float[Tensor, "sequences tokens"]
    centred_row: Float[Tensor, "sequences tokens"]


@dataclass(frozen=True)
class AxisSums:
    """Sums of absolute values of X and of CX along columns and rows, of their rows scaled to unit length, and of X^2.

    The largest column and row sums are the 1- and the inf-norm. Zero rows have no direction and add nothing.
    """

    channel_energy: Float[Tensor, "sequences dim"]
    column: Float[Tensor, "sequences dim"]
    row: Float[Tensor, "sequences tokens"]
    direction: Float[Tensor, "sequences dim"]
    centred_column: Float[Tensor, "sequences dim"]
    centred_row: Float[Tensor, "sequences tokens"]
    centred_direction: Float[Tensor, "sequences dim"]


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


def energies(tokens: Tokens) -> Energies:
    """Mean and sums of squares."""
    n, d = tokens.tokens, tokens.dim
    tails = tokens.zeros(d) if is_wide(tokens.dtype) else None
    found = Energies(tokens.zeros(d), tails, tokens.zeros(n), tokens.zeros(n))
    room = tokens.room()
    for group in tokens.groups():
        read = _reader(tokens, group, room)
        found.mean[group] = sum(X.sum(-2) for _, X in read()) / tokens.count[group].clamp_min(1.0).unsqueeze(-1)
        if tails is not None:
            tails[group] = _mean_tail(tokens, found.mean[group], group)
        for rows, X in read():
            found.row[group, rows] = torch.linalg.vector_norm(X, dim=-1).square_()
            centre_(tokens, X, group, rows, found)
            found.centred_row[group, rows] = torch.linalg.vector_norm(X, dim=-1).square_()
    return found


def axis_sums(tokens: Tokens) -> AxisSums:
    """Sums along columns and rows; each piece of X is read once and turned into the same piece of CX in place."""
    n, d = tokens.tokens, tokens.dim
    found = AxisSums(*(tokens.zeros(width) for width in (d, d, n, d, d, n, d)))
    energy = tokens.energies
    weight, centred_weight = (_inverse_root(e).unsqueeze(-2) for e in (energy.row, energy.centred_row))
    room, spare = tokens.room(), tokens.room()
    for group, rows in tokens.pieces():
        X = tokens.piece(group, rows, room)
        other = spare[: X.shape[0], : X.shape[1]]
        found.channel_energy[group] += torch.mul(X, X, out=other).sum(-2)
        found.direction[group] += (weight[group, :, rows] @ X).squeeze(-2)
        A = torch.abs(X, out=other)
        found.column[group] += A.sum(-2)
        found.row[group, rows] = A.sum(-1)
        C = centre_(tokens, X, group, rows, energy)
        found.centred_direction[group] += (centred_weight[group, :, rows] @ C).squeeze(-2)
        C.abs_()
        found.centred_column[group] += C.sum(-2)
        found.centred_row[group, rows] = C.sum(-1)
    return found


def centre_(tokens: Tokens, X: Tensor, group: slice, rows: slice, energy: Energies) -> Tensor:
    """Turn a piece of X into that of CX, in place."""
    X.sub_(energy.mean[group].unsqueeze(-2))
    if energy.mean_tail is not None:
        X.sub_(energy.mean_tail[group].unsqueeze(-2))
    return tokens.clear_(X, group, rows)


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
        X = tokens.piece(group, slice(None))
        drop = tokens.dropped(group, slice(None))
        if drop is None:
            median = X.median(-2, keepdim=True).values
        else:
            ordered = X.masked_fill(drop, torch.inf).sort(-2).values
            median = ordered.gather(-2, middle[group, None, None].expand(-1, 1, tokens.dim))
        distance = (X - median).abs_()
        found[group] = (distance if drop is None else distance.masked_fill_(drop, 0.0)).sum(-2)
    return found


def _inverse_root(energy: Tensor) -> Tensor:
    return energy.rsqrt().masked_fill_(energy == 0, 0.0)


def _reader(tokens: Tokens, group: slice, room: Tensor) -> Callable[[], Iterable[tuple[slice, Tensor]]]:
    """The pieces of a group, as often as called for; read once where one piece is the whole."""
    strips = list(tokens.strips())
    if len(strips) == 1:
        held = [(strips[0], tokens.piece(group, strips[0], room))]
        return lambda: held
    return lambda: ((rows, tokens.piece(group, rows, room)) for rows in strips)


def _mean_tail(tokens: Tokens, mean: Tensor, group: slice) -> Tensor:
    room = tokens.room()
    pieces = ((rows, tokens.piece(group, rows, room)) for rows in tokens.strips())
    deviations = (tokens.clear_(X.sub_(mean.unsqueeze(-2)), group, rows).sum(-2) for rows, X in pieces)
    return sum(deviations, start=torch.zeros_like(mean)) / tokens.count[group].clamp_min(1.0).unsqueeze(-1)
