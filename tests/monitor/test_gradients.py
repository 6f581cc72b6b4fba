from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope import Surgery
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.monitor import Gauge
from rankscope.monitor.gradients import BlockProjections, find_projections, gradient_values
from rankscope.stream.viewing import view_of
from rankscope.surgery.operating import operate
from tests.monitor.trainings import batches, bert, gpt2, plain, probe


def found(model: nn.Module, given: Any) -> dict[tuple[str | None, int], BlockProjections]:
    loaded = load(model)
    return find_projections(view_of(model, prepare_inputs(loaded, given)[0]), loaded.config)


def values(model: nn.Module, given: Any) -> dict[tuple[str, int], float]:
    return {(row.metric, row.layer): row.mean for row in gradient_values(model, found(model, given))}


def norm(*gradients: Tensor) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def test_separate_projections() -> None:
    model = bert()
    plain(model, batches(1)[0]).backward()
    got = values(model, probe())
    for layer in (0, 1):
        own = model.bert.encoder.layer[layer].attention.self
        query, key, value = own.query.weight.grad, own.key.weight.grad, own.value.weight.grad
        assert got["q_gradient", layer] == pytest.approx(norm(query), rel=1e-12)
        assert got["k_gradient", layer] == pytest.approx(norm(key), rel=1e-12)
        assert got["v_gradient", layer] == pytest.approx(norm(value), rel=1e-12)
        assert got["qk_to_v_gradient", layer] == pytest.approx(norm(query, key) / norm(value), rel=1e-12)


def test_fused_projections_of_a_family() -> None:
    model = gpt2()
    plain(model, batches(1)[0]).backward()
    got = values(model, {"input_ids": probe()["input_ids"]})
    for layer in (0, 1):
        fused = model.transformer.h[layer].attn.c_attn.weight.grad  # (in, 3 out)
        query, key, value = fused.split(16, dim=1)
        assert got["q_gradient", layer] == pytest.approx(norm(query), rel=1e-12)
        assert got["k_gradient", layer] == pytest.approx(norm(key), rel=1e-12)
        assert got["v_gradient", layer] == pytest.approx(norm(value), rel=1e-12)


class Encoder(nn.Module):
    """Torch's own layers: one stacked matrix per block."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def test_stacked_projections_of_torch() -> None:
    model, x = Encoder(), torch.randn(2, 5, 16)
    model(x).square().sum().backward()
    got = values(model, x)
    stacked = model.body.layers[1].self_attn.in_proj_weight.grad
    for name, part in zip(("q_gradient", "k_gradient", "v_gradient"), stacked.chunk(3), strict=True):
        assert got[name, 1] == pytest.approx(norm(part), rel=1e-12)


def test_zero_value_gradient_gives_no_ratio() -> None:
    model = bert()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rows = gradient_values(model, found(model, probe()))
    (ratio,) = [row for row in rows if row.metric == "qk_to_v_gradient" and row.layer == 0]
    assert math.isnan(ratio.mean)
    assert ratio.status == "undefined"


def test_gradients_vanish_at_collapse() -> None:
    """Noci et al. (2022): where tokens are equal, queries and keys have no gradient and values do."""
    model = bert(dropout=0.0, layers=6).double()
    gauge = Gauge(model, probe(), schedule=1, actions=(), strict=True)
    with operate(model, Surgery(skip=0.0, mlp="drop")):
        plain(model, batches(1)[0]).backward()
        gauge.after_backward(0)
        reading = gauge.step(0)
    assert reading is not None
    ratios = reading.values("qk_to_v_gradient")
    residuals = reading.values("relative_residual")
    assert residuals[5] < 1e-6
    assert ratios[5] < 1e-4 * ratios[0]


def test_gradients_are_read_at_due_steps_only_and_not_kept() -> None:
    model = bert()
    gauge = Gauge(model, probe(), schedule=2, strict=True)
    seen = []
    for step in range(4):
        plain(model, batches(1)[0]).backward()
        if step != 2:
            gauge.after_backward(step)
        reading = gauge.step(step)
        seen.append(None if reading is None else bool(reading.values("v_gradient")))
    assert seen == [True, None, False, None]
