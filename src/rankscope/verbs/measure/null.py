"""The same battery on Gaussian tokens of the same shape: what a metric reads when there is no structure at all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import MetricSpec, evaluate

DRAWS = 8


def gaussian_null(
    specs: Sequence[MetricSpec], shapes: Collection[tuple[int, int]], *, seed: int, draws: int = DRAWS
) -> dict[str, Any]:
    """Mean and spread of each token metric over ``draws`` matrices of independent N(0, 1) entries.

    **Estimate.** The shape is that of the largest stream seen. Metrics that are not scale-free are left out: a
    Gaussian of unit variance says nothing about the scale of a model.
    """
    from rankscope.metrics import Invariance

    chosen = [spec for spec in specs if spec.side == "tokens" and Invariance.SCALE in spec.invariant_to]
    if not chosen or not shapes:
        return {}
    tokens, dim = max(shapes)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(draws, tokens, dim, generator=generator, dtype=torch.float64)
    values = evaluate(chosen, Tokens(x), float_floor(x.dtype)).values
    return {
        spec.name: {"mean": float(row.mean()), "sd": float(row.std()), "draws": draws}
        for spec, row in zip(chosen, values, strict=True)
    }
