"""What stands in for a norm."""

from __future__ import annotations

import torch
from torch import Tensor

from rankscope.surgery.operation import NormChoice


def normed(x: Tensor, out: Tensor, choice: NormChoice) -> Tensor:
    """The output of a norm of ``x`` under surgery; ``out`` is what the model's own norm gave."""
    if choice == "keep":
        return out
    if choice == "identity":
        return x.clone()
    squared = x.square().sum(dim=-1, keepdim=True)
    if choice == "rms":
        squared = squared / x.shape[-1]
    return torch.where(squared > 0, x * squared.rsqrt(), x)
