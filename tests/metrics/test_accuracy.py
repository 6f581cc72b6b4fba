"""Values near the rounding of their input are as near as declared, or marked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rankscope._types import Status
from rankscope.linalg.precision import float_floor
from rankscope.metrics import METRICS, SIDES, evaluate

FORMATS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
GRAM_ERROR = 5e-8
"""Times the side: the error that ``effective_rank`` declares for float32 and narrower input near collapse."""


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alike(seed: int, n: int, d: int, residual: float) -> Tensor:
    """Tokens with this relative residual around a common vector."""
    noise = gaussian(seed, n, d)
    noise -= noise.mean(0)
    common = gaussian(seed + 100, 1, d).expand(n, d)
    return common / common.norm() * (1 - residual**2) ** 0.5 + residual * noise / noise.norm()


@pytest.mark.parametrize("format", FORMATS)
def test_effective_rank_of_collapsed_tokens_is_as_near_as_declared(format: str) -> None:
    """The rounding of small singular values in a Gram matrix adds up over the side, and shows only for large ones."""
    side = 256
    x = alike(0, side, side, 1e-8).to(FORMATS[format])
    s = np.linalg.svd(x.double().numpy(), compute_uv=False)
    p = s[s > 0] / s.sum()
    want = float(np.exp(-(p * np.log(p)).sum()))
    assert METRICS["effective_rank"].function(x).item() == pytest.approx(want, rel=GRAM_ERROR * side)


@pytest.mark.parametrize(("residual", "status"), [(1e-3, Status.OK), (1e-6, Status.OK), (1e-12, Status.ESTIMATE)])
def test_a_span_that_is_nearly_rounding_is_marked(residual: float, status: Status) -> None:
    read, added = alike(0, 5, 12, residual), alike(1, 5, 12, 1.0)
    found = evaluate([METRICS["outside_span_share"]], SIDES["branch"].view(read, added), float_floor(torch.float64))
    assert list(Status)[int(found.statuses.item())] is status
