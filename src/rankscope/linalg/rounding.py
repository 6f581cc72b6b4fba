"""Whether two tensors that should be equal differ by more than rounding."""

from __future__ import annotations

import torch
from torch import Tensor


def differs(before: Tensor, after: Tensor, roundings: float) -> Tensor:
    """Where two tensors of one shape differ by more than this many roundings of the largest finite entry of the first.

    NaN equals NaN, and an infinity equals itself.

    Example:
        >>> differs(torch.tensor([1.0, float("nan"), 2.0]), torch.tensor([1.0, float("nan"), 2.1]), 4).tolist()
        [False, False, True]
    """
    if before.numel() == 0:
        return torch.zeros_like(before, dtype=torch.bool)
    same = (before == after) | (before.isnan() & after.isnan())
    size = before.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()
    return ~same & ~((before - after).abs() <= roundings * torch.finfo(before.dtype).eps * size)
