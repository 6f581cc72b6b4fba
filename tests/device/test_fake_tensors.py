"""The battery on fake tensors: devices are propagated and checked by torch's own rules, without data.

The simulated device refuses mixed devices by rules of its own; here torch applies those of its compiler. The tensors
are of CUDA if torch was built with it, and of the simulated device otherwise, because a build without CUDA has no guard
for its device. A metric that reads a value to choose its algorithm cannot go on without data; the others must finish.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.precision import has_float64
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS
from tests.device.simulated import SimulatedDevice

NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)


@pytest.fixture
def place(device: SimulatedDevice) -> Iterator[str]:
    has_float64.cache_clear()
    yield "cuda" if torch.backends.cuda.is_built() else device.name
    has_float64.cache_clear()


@pytest.mark.parametrize("is_padded", [False, True])
def test_metrics_do_not_mix_devices(place: str, is_padded: bool) -> None:
    finished: set[str] = set()
    with FakeTensorMode():
        x = torch.empty(2, 8, 6, device=place, dtype=torch.bfloat16)
        keep = torch.ones(2, 8, device=place, dtype=torch.bool) if is_padded else None
        probs = torch.empty(2, 3, 8, 8, device=place)
        for spec in METRICS.values():
            if spec.side not in ("tokens", "attention"):
                continue
            view = Tokens(x, keep) if spec.side == "tokens" else AttentionMatrix(probs, None, keep)
            try:
                assert spec.function(view).device.type == place, spec.name
                finished.add(spec.name)
            except NEEDS_DATA:
                pass
    assert {"relative_residual", "stream_rms", "mean_cosine", "attention_entropy"} <= finished, finished


def test_mixed_devices_would_be_found(place: str) -> None:
    with FakeTensorMode():
        mean = Tokens(torch.empty(2, 8, 6, device=place)).mean
        with pytest.raises(RuntimeError, match=r"found (at least )?two( different)? devices"):
            mean + torch.zeros(2, 6)
