r"""A sum of float64 tensors whose bits depend neither on the order nor on the grouping of its terms.

Floating-point addition is not associative, so ranks that add their own batches and then each other's sums would not
get the bits of one process. Here every term is cut into digits at fixed places, multiples of :math:`2^{32k}`, and the
digits are added as integers, which is associative. Three digits are kept, counted from the largest term of the whole
sum: at least 64 bits below it, more than the terms themselves have. When a larger term arrives, the lowest digits are
dropped; since the places are fixed, what is left is the same as if it had arrived first.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

DIGIT_BITS = 32
DIGITS = 3
# Below this place, 2^-place would overflow; terms under 2^-928 lose digits.
_LOWEST_TOP = -29


class OrderFreeSum:
    """Exact integer sums of the digits of float64 tensors of one shape, on the CPU.

    Up to 2^31 terms. A term that is not finite makes the sum NaN.

    Args:
        shape: of every term.

    Example:
        >>> one, other = OrderFreeSum([1]), OrderFreeSum([1])
        >>> for term in (1e16, 1.0, -1e16):
        ...     one.add(torch.tensor([term], dtype=torch.float64))
        >>> for term in (1.0, 1e16, -1e16):
        ...     other.add(torch.tensor([term], dtype=torch.float64))
        >>> one.total().item(), other.total().item()
        (1.0, 1.0)
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._digits = torch.zeros(DIGITS, *shape, dtype=torch.int64)
        self._top: int | None = None
        self._finite = True

    @property
    def bytes_held(self) -> int:
        """Memory of the digits."""
        return self._digits.numel() * self._digits.element_size()

    def add(self, term: Tensor) -> None:
        """Add one term."""
        largest = float(term.abs().max())
        if not math.isfinite(largest):
            self._finite = False
        elif largest > 0.0:
            self._raise_to(max(_LOWEST_TOP, (math.frexp(largest)[1] - 1) // DIGIT_BITS))
            assert self._top is not None
            rest = term
            for place, digit in enumerate(self._digits):
                unit = 2.0 ** (DIGIT_BITS * (self._top - place))
                whole = (rest / unit).trunc_()
                digit += whole.to(torch.int64)
                rest = rest - whole * unit  # exact: it only removes leading bits

    def merge(self, other: OrderFreeSum) -> None:
        """Add all terms of another sum."""
        self._finite &= other._finite
        if other._top is not None:
            self._raise_to(other._top)
            assert self._top is not None
            below = self._top - other._top
            if below < DIGITS:
                self._digits[below:] += other._digits[: DIGITS - below]

    def total(self) -> Tensor:
        """The sum, in float64."""
        if not self._finite:
            return torch.full(self._digits.shape[1:], math.nan, dtype=torch.float64)
        found = torch.zeros(self._digits.shape[1:], dtype=torch.float64)
        carry = torch.zeros_like(self._digits[0])
        for place in reversed(range(DIGITS)):  # the smallest first; carries keep each digit exact in float64
            digit = self._digits[place] + carry
            carry = digit >> DIGIT_BITS if place else torch.zeros_like(digit)
            unit = 2.0 ** (DIGIT_BITS * ((self._top or 0) - place))
            found += (digit - (carry << DIGIT_BITS)).to(torch.float64) * unit
        return found

    def to_json(self) -> dict[str, Any]:
        """Everything, for another process."""
        packed = base64.b64encode(self._digits.numpy().astype("<i8", copy=False).tobytes()).decode()
        return {"top": self._top, "finite": self._finite, "digits": packed, "shape": list(self._digits.shape[1:])}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> OrderFreeSum:
        """Inverse of :meth:`to_json`."""
        found = cls(facts["shape"])
        digits = np.frombuffer(base64.b64decode(facts["digits"]), dtype="<i8").reshape(DIGITS, *facts["shape"])
        found._digits = torch.from_numpy(digits.astype(np.int64))
        found._top, found._finite = facts["top"], facts["finite"]
        return found

    def _raise_to(self, top: int) -> None:
        if self._top is None or top > self._top:
            down = DIGITS if self._top is None else min(DIGITS, top - self._top)
            self._digits = torch.cat([torch.zeros_like(self._digits[:down]), self._digits[: DIGITS - down]])
            self._top = top
