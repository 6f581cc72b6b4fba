"""What stands in for a norm."""

from __future__ import annotations

from torch import Tensor

from rankscope.surgery.operation import NormChoice


def normed(x: Tensor, out: Tensor, choice: NormChoice) -> Tensor:
    """The output of a norm of ``x`` under surgery; ``out`` is what the model's own norm gave.

    A token of zeros stays one.
    """
    if choice == "keep":
        return out
    if choice == "identity":
        return x.clone()
    # The result does not depend on the scale of x: dividing by a constant peak keeps the squares in range.
    peak = x.detach().abs().amax(dim=-1, keepdim=True)
    x = x / peak.masked_fill(peak == 0, 1.0)
    squared = x.square().sum(dim=-1, keepdim=True)
    if choice == "rms":
        squared = squared / x.shape[-1]
    return x * squared.masked_fill(peak == 0, 1.0).rsqrt()
