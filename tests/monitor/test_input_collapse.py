"""The gauge between inputs, and the SimSiam-like training of the docs in small."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope import Inputs
from rankscope.models.loading import load
from rankscope.monitor import Gauge
from rankscope.verbs.between_inputs import Pooling

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def simsiam() -> Any:
    spec = importlib.util.spec_from_file_location("simsiam", ROOT / "scripts/simsiam.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_stop_gradient_the_gauge_names_input_collapse_and_with_it_nothing(simsiam: Any) -> None:
    simsiam.EVERY = 1
    collapsed = simsiam.train(1, stop_gradient=False, steps=20)
    assert [(alarm["name"], alarm["state"]) for alarm in collapsed["alarms"]] == [("input_collapse", "raised")]
    assert simsiam.train(1, stop_gradient=True, steps=20)["alarms"] == []


def test_the_recorded_trainings_say_what_the_page_says() -> None:
    told = json.loads((ROOT / "docs/data/monitor/simsiam.json").read_text())
    runs = told["runs"]
    twin = {run["seed"]: run["losses"] for run in runs if run["stop_gradient"]}
    assert len(runs) == 6
    for run in runs:
        names = {alarm["name"] for alarm in run["alarms"]}
        assert names == (set() if run["stop_gradient"] else {"input_collapse"})
        assert all(alarm["loss"] < twin[run["seed"]][alarm["step"] // told["every"]] for alarm in run["alarms"])
    page = (ROOT / "docs/howto/between_inputs.md").read_text()
    for run in runs:
        for alarm in run["alarms"]:
            assert f"| {run['seed']} | no | `input_collapse` at step {alarm['step']} | {alarm['loss']:.3f} |" in page


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
