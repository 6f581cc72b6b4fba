r"""A change of the residual stream, token by token: what a block or a branch adds to it.

For a token x and its change u, with y = x + u, all metrics are functions of the lengths of x, u and y and of two
cosines. Each token is scaled by powers of two of its own, so that a tiny one loses no digit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg.joining import Joinable, Made
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


class Update(Joinable):
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
        self._before, self._other = Tokens(before, keep), Tokens(change, keep)
        self._is_after = False
        self.made = Made(Update, (before, change, keep))
        self.batch_shape = self._before.batch_shape
        self.fewest = self._before.fewest

    @classmethod
    def between(
        cls,
        before: Float[Tensor, "*batch tokens dim"],
        after: Float[Tensor, "*batch tokens dim"],
        keep: Bool[Tensor, "*batch tokens"] | None = None,
    ) -> Update:
        """The update from ``before`` to ``after``; the difference is taken in float64."""
        update = cls(before, after, keep)
        update._is_after = True
        update.made = Made(Update.between, (before, after, keep))
        return update

    @property
    def keeps_bits(self) -> bool:
        """Whether bits on a CPU depend neither on the number of threads nor on what the view is joined with."""
        return self._before.keeps_bits

    @property
    def count(self) -> Float[Tensor, " sequences"]:
        """Number of tokens that count."""
        return self._before.count

    @property
    def valid(self) -> Bool[Tensor, "sequences tokens"]:
        """Which tokens count."""
        return self._before.valid

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
        counts = self.valid & ~values.isnan()
        mean = values.masked_fill(~counts, 0.0).sum(-1) / counts.sum(-1)
        return mean.masked_fill(~self.finite, math.nan)

    def median(self, values: Float[Tensor, "sequences tokens"]) -> Float[Tensor, " sequences"]:
        """Median over the tokens that count and have a value; NaN if there is none, or an entry is not finite.

        For an even number of tokens, the mean of the two in the middle.
        """
        if values.shape[-1] == 0:
            return values.sum(-1) * math.nan
        ordered = values.masked_fill(~self.valid, math.nan).sort(-1).values  # NaN last
        known = (~ordered.isnan()).sum(-1, keepdim=True)
        middle = torch.cat([(known - 1).clamp_min(0) // 2, known // 2], -1).clamp_max(values.shape[-1] - 1)
        return ordered.gather(-1, middle).mean(-1).masked_fill(~self.finite, math.nan)

    @cached_property
    def _sums(self) -> tuple[UpdateSums, Tensor]:
        ratio, alignment, turn, finite = _from_products(self._products)
        return UpdateSums(ratio, alignment, turn), finite.all(-1)

    @cached_property
    def _products(self) -> Products:
        before, other = self._before, self._other
        wide = is_wide(before.dtype) or is_wide(other.dtype)
        rooms = before.room(), before.room(), before.room()
        parts = []
        for group, rows in before.pieces():
            X, given = before.read(group, rows, rooms[0]), other.read(group, rows, rooms[1])
            spare = fitting(rooms[2], X)
            # Both u and y = x + u are needed: one was given, the other fills the spare room.
            if self._is_after:
                U, Y = torch.sub(given, X, out=spare), given
            else:
                U, Y = given, torch.add(X, given, out=spare)
            parts.append(_wide_products(X, U) if wide else _products_of_piece(X, U, Y))
        if not parts:
            empty = before.zeros(before.tokens)
            return Products(empty, empty, empty, empty, empty, empty + 1, empty + 1)
        return Products(*(join_rows(before, list(part)) for part in zip(*parts, strict=True)))


class Products(NamedTuple):
    """Lengths and products of each token: x in ``x_unit``, u in ``u_unit``, y in the larger of the two."""

    x: Float[Tensor, "sequences tokens"]
    u: Float[Tensor, "sequences tokens"]
    y: Float[Tensor, "sequences tokens"]
    xu: Float[Tensor, "sequences tokens"]
    xy: Float[Tensor, "sequences tokens"]
    x_unit: Float[Tensor, "sequences tokens"]
    u_unit: Float[Tensor, "sequences tokens"]


def _products_of_piece(X: Tensor, U: Tensor, Y: Tensor) -> Products:
    """Tokens of a narrow format, whose squares neither overflow nor underflow in float64; U and Y are overwritten."""
    x, u, y = (torch.linalg.vector_norm(part, dim=-1) for part in (X, U, Y))
    xu = U.mul_(X).sum(-1)
    one = torch.ones_like(x)
    return Products(x, u, y, xu, x.square() + xu, one, one)


def _wide_products(X: Tensor, U: Tensor) -> Products:
    """Tokens of any size: x and u are divided by powers of two of their own, x + u by the larger; X, U overwritten."""
    x_unit, u_unit = (power_of_two_below(_largest(part)) for part in (X, U))
    unit = torch.maximum(x_unit, u_unit)
    X.div_(x_unit.unsqueeze(-1))
    U.div_(u_unit.unsqueeze(-1))
    Y = X * (x_unit / unit).unsqueeze(-1) + U * (u_unit / unit).unsqueeze(-1)
    x, u, y = (torch.linalg.vector_norm(part, dim=-1) for part in (X, U, Y))
    return Products(x, u, y, (X * U).sum(-1), (X * Y).sum(-1), x_unit, u_unit)


def _from_products(products: Products) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ratio, alignment, turn, and whether all entries are finite, per token."""
    x, u, y, xu, xy, x_unit, u_unit = products
    unit = torch.maximum(x_unit, u_unit)
    x_share, u_share = x_unit / unit, u_unit / unit
    alignment = (xu / (x * u)).clamp(-1.0, 1.0)
    cosine = (xy / (x * y)).clamp(-1.0, 1.0)
    # 1 - cos loses its digits when y is nearly parallel to x. It then follows from the part of u orthogonal to x:
    # sin² = |u_perp|²/|y|², 1 - cos = sin²/(1 + cos). When u nearly cancels x, that part is the less accurate one.
    across = (u.square() - (xu / x).square()).clamp_min(0.0) * u_share.square()
    by_sine = (across / y.square()).clamp_max(1.0) / (1 + cosine)
    is_small = (cosine > 0) & ((u * u_share).square() < x * x_share * y)
    turn = torch.where(is_small, by_sine, 1 - cosine)
    ratio = ((u / x) * (u_unit / x_unit)).masked_fill_(x == 0, math.nan)
    return ratio, alignment, turn, torch.isfinite(x) & torch.isfinite(u)


def _largest(part: Tensor) -> Tensor:
    return part.abs().amax(-1)


ROUNDINGS = 16.0
"""Roundings of the sum that a gain may leave unexplained; more, and it is not that of this stream and branch."""
LARGEST_ERROR = 0.01
"""Share of the stream that those roundings may be; more, and the branch hides the stream."""


def skip_gain(total: Tensor, branch: Tensor, stream: Tensor) -> float:
    """The factor g of total = g stream + branch, by least squares; NaN if they do not fit.

    Example:
        >>> stream, branch = torch.eye(3), torch.ones(3, 3)
        >>> skip_gain(0.5 * stream + branch, branch, stream), skip_gain(branch, branch, stream)
        (0.5, 0.0)
    """
    if not total.shape == branch.shape == stream.shape:
        return math.nan
    rounding = ROUNDINGS * torch.finfo(total.dtype).eps
    total, branch, stream = (tensor.cpu().double() for tensor in (total, branch, stream))
    carried, size = total - branch, float(stream.norm())
    error = rounding * float(total.norm() + branch.norm() + stream.norm())
    if not (size > 0.0 and math.isfinite(error) and error <= LARGEST_ERROR * size):
        return math.nan
    gain = float((carried / size * (stream / size)).sum())  # the square of a tiny size would underflow
    return round(gain, 6) if float((carried - gain * stream).norm()) <= error else math.nan
