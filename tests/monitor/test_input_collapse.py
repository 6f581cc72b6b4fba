"""The gauge between inputs."""

from __future__ import annotations

import math

import pytest
import torch

from rankscope import Inputs
from rankscope.models.loading import load
from rankscope.monitor import Gauge
from rankscope.verbs.between_inputs import Pooling


@pytest.mark.parametrize("ids", [torch.arange(5, 45).reshape(4, 10), torch.arange(5, 15).repeat(9, 1)])
def test_too_few_or_identical_inputs_are_not_read(ids: torch.Tensor) -> None:
    gauge = Gauge(load("init:tiny-bert").model, Inputs(ids, sequences=9), schedule=1, strict=True)
    reading = gauge.step(0)
    assert reading is not None
    assert reading.values("inputs_relative_residual") == {}


def test_the_reading_is_that_of_the_pooled_inputs() -> None:
    model = load("init:tiny-bert").model
    ids = torch.randint(5, 90, (10, 12), generator=torch.Generator().manual_seed(0))
    reading = Gauge(model, Inputs(ids, sequences=10), schedule=1, strict=True).step(0)
    assert reading is not None
    hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[1:]
    for layer, x in enumerate(hidden):
        pooled = Pooling("mean").pooled(x, None)
        want = (pooled - pooled.mean(0)).norm() / pooled.norm()
        assert reading.values("inputs_relative_residual")[layer] == pytest.approx(float(want), rel=1e-9)
        within = float(reading.values("relative_residual")[layer])
        expected = within / math.sqrt((1 - within**2) * 12)
        assert reading.values("inputs_averaging_residual")[layer] == pytest.approx(expected, rel=0.05)
