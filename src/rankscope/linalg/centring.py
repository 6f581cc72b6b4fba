"""The mean token, and one walk over X and CX together, piece by piece and in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rankscope.linalg.precision import is_wide

if TYPE_CHECKING:
    from rankscope.linalg.tokens import Tokens

Reader = Callable[[], Iterable[tuple[slice, Tensor]]]


class Mean(NamedTuple):
    """The mean token of each sequence.

    ``tail`` is what rounding it to float64 left out: near collapse of float64 tokens CX would show it.
    """

    value: Float[Tensor, "sequences 1 dim"]
    tail: Float[Tensor, "sequences 1 dim"] | None

    def of(self, group: slice) -> Mean:
        """The means of a few of the sequences."""
        return Mean(self.value[group], None if self.tail is None else self.tail[group])


@dataclass
class Piece:
    """A few tokens of a few sequences, and memory of the same shape to compute in; both may be written to."""

    X: Float[Tensor, "group rows dim"]
    spare: Float[Tensor, "group rows dim"]
    mean: Mean
    kept_bits: Int[Tensor, "group rows 1"] | None

    def centre_(self) -> Tensor:
        """Turn X into CX, in place."""
        return centre_(self.X, self.mean, self.kept_bits)


def centre_(X: Tensor, mean: Mean, kept_bits: Tensor | None) -> Tensor:
    """Turn X into CX, in place; dropped tokens stay zero."""
    X.sub_(mean.value)
    if mean.tail is not None:
        X.sub_(mean.tail)
    return clear_(X, kept_bits)


def clear_(X: Tensor, kept_bits: Tensor | None) -> Tensor:
    """Set dropped tokens to zero, in place, whatever they hold: NaN has no bit left either.

    On a processor ``masked_fill_`` takes several times as long.
    """
    if kept_bits is not None:
        X.view(torch.int64).bitwise_and_(kept_bits)
    return X


def fitting(room: Tensor, x: Tensor) -> Tensor:
    """As much of ``room`` as has the shape of ``x``."""
    return room if room.shape == x.shape else room[: x.shape[0], : x.shape[1]]


def walk(tokens: Tokens) -> Iterator[Piece]:
    """Every piece of X, with the mean of its sequences; only sequences of many pieces are read twice.

    There is one piece at least, if an empty one. Pieces share their memory: use one before the next.
    """
    room, spare = tokens.room(), tokens.room()
    strips = list(tokens.strips()) or [slice(0, 0)]
    n = tokens.count.clamp_min(1.0)[:, None, None]
    for group in list(tokens.groups()) or [slice(0, 0)]:
        read = _reader(tokens, group, strips, room)
        mean = _mean(tokens, group, read, spare, n[group])
        for rows, X in read():
            yield Piece(X, fitting(spare, X), mean, tokens.kept_bits(group, rows))


def join_rows(tokens: Tokens, parts: list[Tensor]) -> Float[Tensor, "sequences tokens"]:
    """One number per token, from those of the pieces of a walk: whole sequences, or strip after strip of them."""
    return torch.cat(parts, -1 if _strips(tokens) > 1 else 0).reshape(tokens.sequences, tokens.tokens)


def add_columns(tokens: Tokens, parts: list[Tensor]) -> Float[Tensor, "sequences ..."]:
    """Sums over all tokens of a sequence, from the sums over those of the pieces of a walk."""
    sums = torch.cat(parts)
    return sums.view(tokens.sequences, _strips(tokens), *sums.shape[1:]).sum(1)


def join_means(tokens: Tokens, parts: list[Mean]) -> Mean:
    """The means of all sequences, from those that came with the pieces of a walk."""
    values, tails = zip(*parts[:: _strips(tokens)], strict=True)
    return Mean(torch.cat(values), None if tails[0] is None else torch.cat(tails))


def _strips(tokens: Tokens) -> int:
    return max(1, len(list(tokens.strips())))


def _reader(tokens: Tokens, group: slice, strips: list[slice], room: Tensor) -> Reader:
    """The pieces of a group, as often as called for; read once where one piece is the whole."""
    if len(strips) == 1:
        held = [(strips[0], tokens.piece(group, strips[0], room))]
        return lambda: held
    return lambda: ((rows, tokens.piece(group, rows, room)) for rows in strips)


def _mean(tokens: Tokens, group: slice, read: Reader, spare: Tensor, n: Tensor) -> Mean:
    mean = _total(X.sum(-2, keepdim=True) for _, X in read()).div_(n)
    if not is_wide(tokens.dtype):
        return Mean(mean, None)
    deviations = (
        clear_(torch.sub(X, mean, out=fitting(spare, X)), tokens.kept_bits(group, rows)).sum(-2, keepdim=True)
        for rows, X in read()
    )
    return Mean(mean, _total(deviations).div_(n))


def _total(parts: Iterable[Tensor]) -> Tensor:
    first, *others = parts
    for other in others:
        first.add_(other)
    return first
