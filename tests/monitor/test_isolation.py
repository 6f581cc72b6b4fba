"""Training with a gauge and without one gives the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rankscope.monitor import Gauge
from rankscope.monitor.isolation import beside_training
from tests.monitor.trainings import assert_bit_equal, bert, gpt2, plain, probe, train

MODELS: dict[str, Callable[[], Any]] = {
    "dropout": bert,
    "gradient checkpointing": lambda: bert(checkpointing=True),
    "fused projections": gpt2,
}


def forward_under_autocast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plain(model, batch)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_bit_equal(name: str) -> None:
    bare = train(MODELS[name]())
    model = MODELS[name]()
    gauge = Gauge(model, probe(), schedule=1, strict=True)
    watched = train(model, gauge)
    assert gauge.last is not None
    assert gauge.last.step == 5
    assert_bit_equal(bare, watched)


def test_inside_an_open_autocast_no_cast_weight_is_left_behind() -> None:
    def train_inside_one_autocast(gauge: Gauge | None, model: Any) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if gauge is not None:
                assert gauge.step(0) is not None
            torch.manual_seed(0)
            plain(model, {**probe(), "labels": probe()["input_ids"]}).backward()
            assert torch.is_autocast_cache_enabled()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    bare = train_inside_one_autocast(None, bert())
    model = bert()
    watched = train_inside_one_autocast(Gauge(model, probe(), strict=True), model)
    assert len(bare) > 20
    assert_bit_equal(bare, watched)


def test_model_in_torch_compile_runs_as_written_and_is_not_compiled_again() -> None:
    compilations = 0

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return graph.forward

    def compiled() -> Any:
        return torch.compile(bert(), backend=counting)

    bare = train(compiled())
    once, compilations = compilations, 0
    torch._dynamo.reset()
    model = compiled()
    gauge = Gauge(model, probe(), schedule=1, strict=True)
    watched = train(model, gauge)
    assert once == compilations > 0
    assert gauge.last is not None
    assert_bit_equal(bare, watched)
    torch._dynamo.reset()


def test_model_compiled_in_place_is_left_compiled_and_read_as_written() -> None:
    compiled: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = bert()
    model.compile(backend=counting)
    before = model._compiled_call_impl
    assert Gauge(model, probe(), strict=True).step(0) is not None
    assert model._compiled_call_impl is before
    assert compiled == []
    torch._dynamo.reset()


class Careless(nn.Module):
    """Draws from every generator, writes to one buffer and replaces another, in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.sum().reshape(1)
        return x + random.random() + np.random.rand() + torch.rand(1)


def test_what_a_careless_model_touches_is_put_back() -> None:
    model = nn.ModuleList([Careless(), nn.Dropout(0.5)])
    model[1].eval()
    careless = model[0]
    kept = careless.last
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    modes = []

    def look() -> None:
        with beside_training(model):
            careless(torch.ones(2))
            modes.append((careless.training, torch.is_grad_enabled()))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        look()
    assert modes == [(False, False)]
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert careless.calls.item() == 0.0
    assert careless.last is kept
    assert model.training
    assert careless.training
    assert not model[1].training


def test_hooks_are_gone_after_a_reading_and_after_a_failed_one() -> None:
    def hooks(model: nn.Module) -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    model = bert()
    gauge = Gauge(model, probe(), schedule=1)
    gauge.step(0)
    assert hooks(model) == 0
    model.bert.encoder.layer[1].forward = None
    gauge.step(1)
    assert gauge.disabled is not None
    assert hooks(model) == 0
    assert model.training
