r"""A change of the residual stream, token by token: what a block or a branch adds to it.

For a token x and its change u, with y = x + u, all metrics are functions of the lengths of x, u and y and of two
cosines. Each token is scaled by powers of two of its own, so that a huge token beside a tiny one loses no digit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg.precision import is_wide, power_of_two_below
from rankscope.linalg.tokens import Tokens, fitting, join_rows


@dataclass(frozen=True)
class UpdateSums:
    r"""Per token: :math:`\|u\|/\|x\|`, and the cosines of x with u and with x + u.

    Attributes:
        ratio: NaN if x is zero.
        alignment: cosine of x and u; NaN if one of them is zero.
        turn: one minus the cosine of x and x + u; NaN if one of them is zero.
    """

    ratio: Float[Tensor, "sequences tokens"]
    alignment: Float[Tensor, "sequences tokens"]
    turn: Float[Tensor, "sequences tokens"]


class Update:
    """The stream ``before`` and the ``change`` that is added to it, both ``(*batch, tokens, dim)``.

    Reductions are computed in float64, piece by piece, on first use, and cached.

    Args:
        before: the stream.
        change: what is added to it. For a whole block, which may also normalise, the difference of output and input.
        keep: which tokens count, ``(*batch, tokens)``.

    Raises:
        InputError: the two do not have the same shape, or ``keep`` does not fit them.
    """

    def __init__(
        self,
        before: Float[Tensor, "*batch tokens dim"],
        change: Float[Tensor, "*batch tokens dim"],
        keep: Bool[Tensor, "*batch tokens"] | None = None,
    ) -> None:
        if before.shape != change.shape:
            raise InputError(
                f"The stream has the shape {tuple(before.shape)} and its change {tuple(change.shape)}. Expected the "
                "same shape: pass the stream and what is added to it."
            )
        self._before, self._change = Tokens(before, keep), Tokens(change, keep)
        self.batch_shape = self._before.batch_shape
        self.fewest = self._before.fewest

    @property
    def count(self) -> Float[Tensor, " sequences"]:
        """Number of tokens that count."""
        return self._before.count

    @property
    def kept(self) -> Bool[Tensor, "sequences tokens"]:
        """Which tokens count."""
        return self._before.kept

    @property
    def finite(self) -> Bool[Tensor, " sequences"]:
        """Whether every entry that counts is a finite number."""
        return self._sums[1]

    @property
    def sums(self) -> UpdateSums:
        """Ratio and cosines of each token."""
        return self._sums[0]

    def mean(self, values: Float[Tensor, "sequences tokens"]) -> Float[Tensor, " sequences"]:
        """Mean over the tokens that count and have a value (are not NaN); NaN if an entry is not finite."""
        counts = self.kept & ~values.isnan()
        mean = values.masked_fill(~counts, 0.0).sum(-1) / counts.sum(-1)
        return mean.masked_fill(~self.finite, math.nan)

    def median(self, values: Float[Tensor, "sequences tokens"]) -> Float[Tensor, " sequences"]:
        """Median over the tokens that count and have a value; NaN if there is none, or an entry is not finite.

        For an even number of tokens, the mean of the two in the middle.
        """
        if values.shape[-1] == 0:
            return values.sum(-1) * math.nan
        ordered = values.masked_fill(~self.kept, math.nan).sort(-1).values  # NaN last
        known = (~ordered.isnan()).sum(-1, keepdim=True)
        middle = torch.cat([(known - 1).clamp_min(0) // 2, known // 2], -1).clamp_max(values.shape[-1] - 1)
        return ordered.gather(-1, middle).mean(-1).masked_fill(~self.finite, math.nan)

    @cached_property
    def _sums(self) -> tuple[UpdateSums, Tensor]:
        before, change = self._before, self._change
        wide = is_wide(before.dtype) or is_wide(change.dtype)
        rooms = before.room(), before.room(), before.room()
        parts = []
        for group, rows in before.pieces():
            X, U = before.read(group, rows, rooms[0]), change.read(group, rows, rooms[1])
            parts.append(_sums_of_piece(X, U, fitting(rooms[2], X), wide=wide))
        if not parts:
            empty = before.zeros(before.tokens)
            return UpdateSums(empty, empty, empty), torch.ones_like(before.count, dtype=torch.bool)
        ratio, alignment, turn, finite = (join_rows(before, list(part)) for part in zip(*parts, strict=True))
        return UpdateSums(ratio, alignment, turn), finite.bool().all(-1)


def _sums_of_piece(X: Tensor, U: Tensor, spare: Tensor, *, wide: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ratio, alignment, turn and whether all entries are finite; X and U are overwritten if ``wide``."""
    one = torch.ones_like(X[..., 0])
    x_unit, u_unit = (power_of_two_below(_largest(part)) for part in (X, U)) if wide else (one, one)
    unit = torch.maximum(x_unit, u_unit)
    if wide:
        X.div_(x_unit.unsqueeze(-1))
        U.div_(u_unit.unsqueeze(-1))
    # In units of their own: lengths of x and u, and their product.
    x, u = (torch.linalg.vector_norm(part, dim=-1) for part in (X, U))
    xu = torch.mul(X, U, out=spare).sum(-1)
    finite = torch.isfinite(x) & torch.isfinite(u)
    x_share, u_share = x_unit / unit, u_unit / unit
    if wide:
        Y = torch.mul(X, x_share.unsqueeze(-1), out=spare).addcmul_(U, u_share.unsqueeze(-1))
        y, xy = torch.linalg.vector_norm(Y, dim=-1), (X * Y).sum(-1)
    else:
        y, xy = torch.linalg.vector_norm(torch.add(X, U, out=spare), dim=-1), x.square() + xu
    alignment = (xu / (x * u)).clamp(-1.0, 1.0)
    cosine = (xy / (x * y)).clamp(-1.0, 1.0)
    # 1 - cos loses its digits when y is nearly parallel to x. It then follows from the part of u orthogonal to x:
    # sin² = |u_perp|²/|y|², 1 - cos = sin²/(1 + cos). When u nearly cancels x, that part is the less accurate one.
    across = (u.square() - (xu / x).square()).clamp_min(0.0) * u_share.square()
    by_sine = (across / y.square()).clamp_max(1.0) / (1 + cosine)
    is_small = (cosine > 0) & ((u * u_share).square() < x * x_share * y)
    turn = torch.where(is_small, by_sine, 1 - cosine)
    ratio = ((u / x) * (u_unit / x_unit)).masked_fill_(x == 0, math.nan)
    return ratio, alignment, turn, finite.to(x)


def _largest(part: Tensor) -> Tensor:
    return part.abs().amax(-1)
