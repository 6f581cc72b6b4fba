"""Classes of layers from their facts, and the depth each float format sees to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rankscope.errors import InputError
from rankscope.ext.theory.classification import LayerFacts, classify, float_visible_depth
from rankscope.linalg.cubic_law import cubic_step
from rankscope.linalg.precision import float_floor
from tests.ext.theory.networks import random_layer, random_tokens
from tests.reference import cubic as reference


@pytest.mark.parametrize(
    ("facts", "order", "factor"),
    [
        (LayerFacts(True, True, log_cubic_constant=math.log(2)), 3, 2.0),
        (LayerFacts(True, True, skip_gain=0.5), 1, 0.5),
        (LayerFacts(True, True, skip_gain=-0.5, row_map_factor=1.5), 1, 0.75),
        (LayerFacts(True, True, skip_gain=1.0), 0, 1.0),
        (LayerFacts(True, True, skip_gain=0.5, row_map_factor=3.0), 0, 1.5),
        (LayerFacts(False, True, linear_factor=0.5), 1, 0.5),
        (LayerFacts(True, False, linear_factor=0.9, row_map_factor=0.5), 1, 0.45),
        (LayerFacts(False, False, linear_factor=1.2), 0, 1.2),
    ],
)
def test_order_and_factor(facts: LayerFacts, order: int, factor: float) -> None:
    found = classify(facts)
    assert (found.order, found.factor) == (order, pytest.approx(factor))
    assert found.reason.endswith(".")


def test_order_three_needs_all_three_facts() -> None:
    """Dropping any one of complete, position-free and no skip lowers the order."""
    assert classify(LayerFacts(True, True)).order == 3
    for facts in (
        LayerFacts(False, True, linear_factor=0.5),
        LayerFacts(True, False, linear_factor=0.5),
        LayerFacts(True, True, 0.5),
    ):
        assert classify(facts).order == 1


def test_reasons_name_their_causes() -> None:
    both = classify(LayerFacts(False, False, skip_gain=0.5, linear_factor=0.9)).reason
    assert "mask" in both
    assert "positions" in both
    assert "gain 0.5" in both
    assert "does not shrink" in classify(LayerFacts(True, True, skip_gain=2.0)).reason


def test_a_mask_without_its_factor_is_refused() -> None:
    with pytest.raises(InputError, match="second eigenvalue"):
        classify(LayerFacts(False, True))


def test_measured_orders_agree_with_the_class() -> None:
    """Two residuals a factor e apart before the layer, read after it: the slope is the order."""
    rng = np.random.default_rng(0)
    layer = random_layer(rng, dim=4, heads=2, d_qk=3, d_v=3)
    x, R = random_tokens(rng, 5, 4)
    after = [reference.float_step(x, R, log_r, layer.heads, layer.scale)[2] for log_r in (-40.0, -41.0)]
    found = classify(
        LayerFacts(True, True, log_cubic_constant=float(cubic_step(torch.from_numpy(R), layer.tensors).log_constant))
    )
    assert after[0] - after[1] == pytest.approx(found.order, abs=1e-12)
    assert math.exp(after[0] + 3 * 40.0) == pytest.approx(found.factor, rel=1e-12)


def test_each_format_stops_at_its_floor() -> None:
    logs = [math.log(10) * value for value in (-0.4, -4.26, -15.87, -50.6)]
    floors = {dtype: float_visible_depth(logs, float_floor(dtype)) for dtype in (torch.bfloat16, torch.float32)}
    assert floors == {torch.bfloat16: 2, torch.float32: 3}
    assert float_visible_depth(logs, 1e-20) == 4
    assert float_visible_depth(logs, 1e-60) is None
    assert float_visible_depth([-math.inf], 1e-300) == 1
    with pytest.raises(InputError, match="above 0"):
        float_visible_depth(logs, 0.0)
