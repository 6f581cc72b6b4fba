from __future__ import annotations

import math

import pytest
import torch

from rankscope.ext.paths.single import LengthReading, MedianInterval, decay_orders, follow, path_decay
from rankscope.metrics.residual import relative_residual
from tests.ext.paths.conftest import Small


def test_the_one_path_of_length_zero(small: Small) -> None:
    reading = path_decay(small.network, 10, lengths=[0])[0]
    stream = follow(small.network, [(None, None, None)])[0]
    assert reading.residual.estimate == pytest.approx(float(relative_residual(stream).mean()), rel=1e-12)
    sizes = stream.flatten(1).norm(dim=1) / small.network.out.flatten(1).norm(dim=1)
    assert reading.norm.estimate == pytest.approx(float(sizes.mean()), rel=1e-12)
    assert math.isinf(reading.norm.high)


def test_intervals_hold_the_median_of_all_paths(small: Small) -> None:
    """Twelve paths of length 2: 60 draws, fixed beforehand, at 99.9%."""
    every = [(a, b, c) for a in (None, 0, 1) for b in (None, 0, 1) for c in (None, 0, 1)]
    mine = [path for path in every if sum(head is not None for head in path) == 2]
    values = relative_residual(follow(small.network, mine).flatten(0, 1)).view(12, -1).mean(dim=1)
    reading = path_decay(small.network, 60, lengths=[2], confidence=0.999)[0]
    ordered = values.sort().values
    assert reading.residual.low <= float(ordered[6])
    assert reading.residual.high >= float(ordered[5])
    assert torch.isfinite(values).all()


def test_orders() -> None:
    readings = [
        LengthReading(k, MedianInterval(r, r, r, 0.95), MedianInterval(1, 1, 1, 0.95))
        for k, r in enumerate((0.1, 1e-3, 1e-9))
    ]
    assert decay_orders(readings) == pytest.approx([3.0, 3.0])
