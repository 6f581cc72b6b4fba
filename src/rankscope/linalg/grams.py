r"""Gram matrices of X and of CX, on the smaller side, and the spectra taken from them.

CX is formed first and its Gram matrix taken; that of X follows by adding the terms of the mean m,

.. math:: XX^T = (CX)(CX)^T + a 1^T + 1 a^T + \|m\|^2 11^T, \quad a = CX\,m, \qquad X^TX = (CX)^T(CX) + n\,m m^T .

The other way round, subtracting the mean from the Gram matrix of X, cancels every digit exactly under collapse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.linalg import spectrum
from rankscope.linalg.precision import is_wide
from rankscope.linalg.triangular_factor import chunks, is_tall, triangular_factor

if TYPE_CHECKING:
    from rankscope.linalg.tokens import Tokens

_KEPT_ENTRIES = 1 << 22


@dataclass(frozen=True)
class GramBlock:
    """Gram matrices of a few sequences; zero where entries are not finite, so that LAPACK returns."""

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
        values = spectrum.gram_eigenvalues(block.centred if centred else block.plain).sqrt_()
        found[block.group] = spectrum.without_structural_zeros(values, rank[block.group])
    if is_wide(tokens.dtype):
        lost = spectrum.is_lost_in_gram(found, rank) & tokens.finite
        for i in lost.nonzero().flatten().tolist():
            group = slice(i, i + 1)
            values = spectrum.direct_singular_values(_same_spectrum(tokens, group, centred=centred), otherwise=found[i])
            found[group] = spectrum.without_structural_zeros(values.unsqueeze(0), rank[group])
    return found


def _same_spectrum(tokens: Tokens, group: slice, *, centred: bool) -> Tensor:
    """X or CX of one sequence; of a long one its triangular factor, which has the same singular values."""
    read = tokens.centred_piece if centred else tokens.piece
    if not is_tall(tokens.tokens, tokens.dim):
        return read(group, slice(None))[0]
    return triangular_factor(read(group, rows)[0] for rows in chunks(tokens.tokens, tokens.dim))


def gram_blocks(tokens: Tokens) -> Iterator[GramBlock]:
    """Gram matrices, a few sequences at a time."""
    by_tokens = tokens.tokens <= tokens.dim
    build, room = (_token_side, tokens.group_room()) if by_tokens else (_channel_side, tokens.room())
    broken = None if bool(tokens.finite.all()) else ~tokens.finite[:, None, None]
    for group in tokens.groups():
        plain, centred = build(tokens, group, room)
        if broken is not None:
            plain.masked_fill_(broken[group], 0.0)
            centred.masked_fill_(broken[group], 0.0)
        yield GramBlock(group, plain, centred)


def _blocks(tokens: Tokens) -> Iterable[GramBlock]:
    small = tokens.sequences * _side(tokens) ** 2 <= _KEPT_ENTRIES
    return tokens.kept_grams if small else gram_blocks(tokens)


def _side(tokens: Tokens) -> int:
    return min(tokens.tokens, tokens.dim)


def _token_side(tokens: Tokens, group: slice, room: Tensor) -> tuple[Tensor, Tensor]:
    rows = slice(None)
    C = tokens.centred_piece(group, rows, room)
    mean = tokens.mean[group].unsqueeze(-1)
    centred = _times_own_transpose(C)
    a = C @ mean
    plain = (a + a.mT).add_(mean.mT @ mean).add_(centred)
    drop = tokens.dropped(group, rows)
    return (plain if drop is None else plain.masked_fill_(drop | drop.mT, 0.0)), centred


def _channel_side(tokens: Tokens, group: slice, room: Tensor) -> tuple[Tensor, Tensor]:
    mean = tokens.mean[group].unsqueeze(-1)
    centred = torch.zeros(mean.shape[0], tokens.dim, tokens.dim, dtype=torch.float64, device=tokens.device)
    for rows in tokens.strips():
        C = tokens.centred_piece(group, rows, room)
        centred.baddbmm_(C.mT, C)
    return torch.baddbmm(centred, mean * tokens.count[group, None, None], mean.mT), centred


def _times_own_transpose(C: Tensor) -> Tensor:
    """CC^T, whose upper right quarter is the mirror of the lower left and need not be computed."""
    half = C.shape[-2] // 2
    upper, lower = C[:, :half], C[:, half:]
    gram = C.new_empty(C.shape[0], C.shape[1], C.shape[1])
    gram[:, :, :half] = C @ upper.mT
    gram[:, half:, half:] = lower @ lower.mT
    gram[:, :half, half:] = gram[:, half:, :half].mT
    return gram
