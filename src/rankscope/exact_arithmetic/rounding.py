"""The same pass once more with every last digit moved: what changes with it was rounding.

Rules keep the digits of each part, but no rule can keep what a sum of parts cancels. Such a loss shows when the pass is
repeated with the results of all operations moved by up to one part in 2^48: digits that survive are digits.

The movement is a function of the value alone. Equal values move alike and opposite ones by opposite amounts, so what
cancels by construction (two equal heads that are subtracted) still cancels. Where a sum rounds a small part away, the
movement also depends on that part: numbers that are equal only because their difference was lost move apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_BY = 2.0 ** (-48 - 63)  # times 63 bits that look random: up to 32 units in the last place
_MAGNITUDE = 0x7FFFFFFFFFFFFFFF
_FACTORS = (-7046029254386353131, -4417276706812531889)  # odd numbers whose bits look random
_moving = False


@contextmanager
def last_digits_moved() -> Iterator[None]:
    """Inside the block operations on deviations give their results with the last digits moved."""
    global _moving
    before, _moving = _moving, True
    try:
        yield
    finally:
        _moving = before


def are_moved() -> bool:
    """Whether last digits are being moved."""
    return _moving


def moved(values: Tensor, *lost: Tensor) -> Tensor:
    """``values`` with their last digits moved, by an amount that also depends on what they may have ``lost``.

    Args:
        values: of any format; only floating point numbers are moved.
        lost: numbers or fingerprints (int64) that broadcast with ``values``.
    """
    if not _moving or not values.is_floating_point() or values.numel() == 0:
        return values
    mixed = _mixed(values)
    for part in lost:
        mixed = (part if part.dtype == torch.int64 else _mixed(part)) + mixed * _FACTORS[1]
    mixed = (mixed ^ (mixed >> 31)) * _FACTORS[1]
    return values * (1 + _BY * mixed.double())


def fingerprint(values: Tensor, dim: int) -> Tensor:
    """One number for the entries along an axis, whatever their order; zeros do not count."""
    return _mixed(values).sum(dim=dim, keepdim=True)


def product_fingerprint(u: Tensor, v: Tensor) -> Tensor:
    """One number for the pairs of factors in each entry of ``u @ v``, whatever their order; zeros do not count."""
    # Whole numbers below 2^20: their sums of products are exact in float64 in any order.
    left, right = ((_mixed(part) >> 44).double() for part in (u, v))
    return (left @ right).to(torch.int64)


def summed_along(values: Tensor, dim: int) -> Tensor:
    """The sum along an axis, which stays; moved where it had to be rounded."""
    if not _moving:
        return values.sum(dim=dim, keepdim=True)
    total = torch.zeros_like(values.narrow(dim, 0, 1))
    rounded = torch.zeros_like(total, dtype=torch.bool)
    for entry in values.unsqueeze(dim).unbind(dim + 1):
        after = total + entry
        share = after - total
        rounded |= (total - (after - share)) + (entry - share) != 0  # the error of a sum of two (Knuth)
        total = after
    return torch.where(rounded, moved(total, fingerprint(values, dim)), total)


def _mixed(values: Tensor) -> Tensor:
    """Bits of the absolute values, mixed up; 0 of 0."""
    if values.is_complex():
        values = torch.view_as_real(values).sum(dim=-1)
    bits = (values.contiguous().view(torch.int64) & _MAGNITUDE) * _FACTORS[0]
    return bits ^ (bits >> 29)
