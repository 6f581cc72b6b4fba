"""Float formats: where float64 statistics are computed, and the floor below which a format shows only rounding."""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR_IN_EPS = 4.0
_NO_FLOAT64 = frozenset({"mps"})
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-1000, 2.0**1000


def float_floor(dtype: torch.dtype) -> float:
    r"""Relative residual at and below which a float format shows only rounding: :math:`4\varepsilon`.

    **Heuristic.** A stored activation has a relative error of up to :math:`\varepsilon/2`, so rows that should be equal
    differ by about that much. Published float32 curves of pure attention flatten at 1.2e-7 to 2.1e-7, one to two
    :math:`\varepsilon`; the factor 4 leaves room for the rounding of the previous layer.

    Example:
        >>> float_floor(torch.float32) == 4 * 2.0**-23
        True
    """
    return FLOOR_IN_EPS * torch.finfo(dtype).eps


def float64_home(x: Tensor) -> torch.device:
    """The device on which statistics of ``x`` are computed: its own, or the CPU if its own has no float64."""
    return torch.device("cpu") if x.device.type in _NO_FLOAT64 else x.device


def is_wide(dtype: torch.dtype) -> bool:
    """Whether squares of this format may exceed the range, and its digits the precision, of float64 arithmetic."""
    return dtype == torch.float64


def may_hold(condition: Tensor) -> bool:
    """Whether the condition holds somewhere; True on an accelerator, where to ask would make the host wait.

    For work that changes nothing where the condition does not hold.

    Example:
        >>> may_hold(torch.tensor([False, True])), may_hold(torch.tensor([False]))
        (True, False)
    """
    return condition.device.type != "cpu" or bool(condition.any())


def power_of_two_below(largest: Tensor) -> Tensor:
    """The power of two at or below each entry (1 for zero and non-finite entries): dividing by it is exact.

    Example:
        >>> power_of_two_below(torch.tensor([5.0, 0.0], dtype=torch.float64)).tolist()
        [4.0, 1.0]
    """
    mantissa, _ = torch.frexp(largest)
    scale = (largest / (2 * mantissa)).clamp(_LEAST_SCALE, _LARGEST_SCALE)
    return torch.where(torch.isfinite(largest) & (largest > 0), scale, torch.ones_like(scale))
