"""Detects rounding errors by repeating a pass with the last digits of every result perturbed.

Rules keep the digits of each part, but no rule can recover what cancels in a sum of parts. Such a loss becomes visible
when the pass is repeated with the results of all operations perturbed by up to one part in 2^48: digits that do not
change are correct.

The perturbation is a function of the value alone. Equal values are perturbed equally and opposite ones oppositely, so
what cancels by construction (two equal heads that are subtracted) still cancels. If a sum rounds a small part away, the
perturbation also depends on that part: numbers that are equal only because their difference was lost become different.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_BY = 2.0 ** (-48 - 63)  # times 63 pseudorandom bits: up to 32 units in the last place
_MAGNITUDE = 0x7FFFFFFFFFFFFFFF
_FACTORS = (-7046029254386353131, -4417276706812531889)  # odd multipliers with random-looking bits, to mix bits
_moving = False


@contextmanager
def last_digits_moved() -> Iterator[None]:
    """Inside the ``with`` block, operations on deviations return results with perturbed last digits."""
    global _moving
    before, _moving = _moving, True
    try:
        yield
    finally:
        _moving = before


def are_moved() -> bool:
    """Whether last digits are being perturbed."""
    return _moving


def moved(values: Tensor, *lost: Tensor) -> Tensor:
    """``values`` with perturbed last digits, by an amount that also depends on what they may have ``lost``.

    Args:
        values: any dtype; only floating-point numbers are perturbed.
        lost: numbers or fingerprints (int64) that broadcast with ``values``.
    """
    if not _moving or not values.is_floating_point() or values.numel() == 0:
        return values
    # A multiplicative hash of the bits. It depends on the absolute value only, so -x is perturbed to minus what x is.
    mixed = _mixed(values)
    for part in lost:
        mixed = (part if part.dtype == torch.int64 else _mixed(part)) + mixed * _FACTORS[1]
    mixed = (mixed ^ (mixed >> 31)) * _FACTORS[1]
    return values * (1 + _BY * mixed.double())


def fingerprint(values: Tensor, dim: int) -> Tensor:
    """A hash of the entries along an axis, independent of their order; zeros do not count."""
    return _mixed(values).sum(dim=dim, keepdim=True)


def product_fingerprint(u: Tensor, v: Tensor) -> Tensor:
    """A hash of the pairs of factors in each entry of ``u @ v``, independent of their order; zeros do not count."""
    # Integers below 2^20: their sums of products are exact in float64 in any order.
    left, right = ((_mixed(part) >> 44).double() for part in (u, v))
    return (left @ right).to(torch.int64)


def summed_along(values: Tensor, dim: int) -> Tensor:
    """The sum along an axis (kept with size 1), perturbed if it was rounded."""
    if not _moving:
        return values.sum(dim=dim, keepdim=True)
    # A sum without rounding must stay unperturbed: rows that sum to zero exactly have to do so in both passes.
    total = torch.zeros_like(values.narrow(dim, 0, 1))
    rounded = torch.zeros_like(total, dtype=torch.bool)
    for entry in values.unsqueeze(dim).unbind(dim + 1):
        after = total + entry
        share = after - total
        rounded |= (total - (after - share)) + (entry - share) != 0  # error of the addition (Knuth's two-sum)
        total = after
    return torch.where(rounded, moved(total, fingerprint(values, dim)), total)


def _mixed(values: Tensor) -> Tensor:
    """Hash of the bits of the absolute values; 0 for 0."""
    if values.is_complex():
        values = torch.view_as_real(values).sum(dim=-1)
    bits = (values.contiguous().view(torch.int64) & _MAGNITUDE) * _FACTORS[0]
    return bits ^ (bits >> 29)
