"""``exact``: agreement with float64 where float64 can see, the orders and the law where it cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rankscope import Inputs, Surgery
from rankscope.models.loading import load
from rankscope.runs.run import Run
from rankscope.surgery.operating import operate
from rankscope.verbs.exact.judge import exact_curves, order_of
from rankscope.verbs.exact.run import exact
from tests.flat_calls import flat
from tests.own_models import GPT, ids

PURE = {"skip": 0.0, "mlp": "drop", "norm": "identity"}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("spec", ["init:tiny-bert", "init:tiny-gpt2", "init:tiny-llama", "init:tiny-vit"])
@pytest.mark.parametrize("cut", [{}, {"skip": 0.0}, PURE, {"skip": 0.5}])
def test_float64_agrees_above_its_floor(spec: str, cut: dict) -> None:
    run = flat(exact, spec, sequences=2, tokens=12, **cut)
    curves = exact_curves(run.table, "log10_residual", None)
    relative = exact_curves(run.table, "log10_relative_residual", None)["exact"]
    visible = relative.mean > -6
    assert visible.any()
    difference = np.abs(curves["exact"].mean - curves["float64"].mean)[visible]
    assert difference.max() < 1e-8


def test_pure_attention_has_order_three_and_follows_the_law() -> None:
    run = exact("init:tiny-bert", Inputs(sequences=2, tokens=16), Surgery(**PURE))
    assert order_of(run.table, None) == 3
    curves = exact_curves(run.table, "log10_residual", None)
    assert curves["exact"].mean[-1] < -40
    # the law's error is of the order of the squared residual that enters the block
    assert np.abs(curves["exact"].mean - curves["law"].mean)[1:].max() < 1e-5
    cut, _, rest = run.verdict.partition(": ")
    assert cut == "Without skip connections, MLPs and norms"
    assert rest.startswith(
        "Collapsed in every block: from block 1 on, each block cubes the distance between tokens (order 3). "
    )
    assert "float64 cannot resolve block 2" in run.verdict


def test_a_causal_mask_leaves_order_one_and_no_word_of_the_law() -> None:
    run = exact("init:tiny-bert", Inputs(sequences=1, tokens=16), Surgery(mask="causal", **PURE), stability=True)
    orders = exact_curves(run.table, "order", None)["exact"].mean
    assert np.abs(orders - 1).max() < 0.01
    assert "law" not in exact_curves(run.table, "log10_residual", None)
    factors = exact_curves(run.table, "factor", None)["exact"].mean
    linear = exact_curves(run.table, "linear_factor", None)["exact"].mean
    assert np.allclose(linear, factors, rtol=0.2)


@pytest.mark.slow
def test_orthogonal_values_under_a_causal_mask_halve_the_residual() -> None:
    torch.manual_seed(0)
    model = GPT("pre", dim=16, heads=1, depth=40).double()
    with torch.no_grad():
        for block in model.blocks:
            torch.nn.init.normal_(block.attention.qkv.weight, std=1 / 16)
            torch.nn.init.orthogonal_(block.attention.qkv.weight[32:])
            torch.nn.init.orthogonal_(block.attention.out.weight)
    run = exact(model, ids(1, 12), Surgery(**PURE))
    factors = exact_curves(run.table, "factor", None)["exact"].mean
    assert abs(factors[-1] - 0.5) < 1e-6


def test_surgery_may_be_under_way_around_the_call() -> None:
    model = load("init:tiny-bert").model
    inside = exact(model, ids(1, 9), Surgery(skip=0.0), plain=False)
    with operate(model, Surgery(skip=0.0)):
        around = exact(model, ids(1, 9), plain=False)
    for metric in ("log10_residual", "order"):
        assert np.array_equal(
            exact_curves(inside.table, metric, None)["exact"].mean,
            exact_curves(around.table, metric, None)["exact"].mean,
        )
    assert around.provenance.operations[0]["attention_skip"] == 0.0


def test_a_network_with_skips_does_not_collapse() -> None:
    run = exact("init:tiny-bert", Inputs(sequences=1, tokens=12))
    assert run.verdict.startswith("No collapse")


def test_the_model_is_left_as_it_was() -> None:
    model = load("init:tiny-bert").model
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    with torch.no_grad():
        before = model(ids())[0]
        exact(model, ids(1, 9), Surgery(skip=0.0))
        assert torch.equal(model(ids())[0], before)
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_rows_and_round_trip(tmp_path) -> None:
    run = exact("init:tiny-gpt2", Inputs(sequences=1, tokens=8))
    rows = run.to_json()["rows"]
    assert {row["metric"] for row in rows} >= {"log10_residual", "log10_relative_residual", "order", "factor"}
    assert {row["arithmetic"] for row in rows} == {"exact", "float64", "float32"}
    run.save(tmp_path / "run")
    assert Run.load(tmp_path / "run").to_json() == run.to_json()
    assert "order" not in str(run)  # its tokens are far apart, where the slope is that of no power
    assert "order" in str(exact("init:tiny-bert", Inputs(sequences=1, tokens=8), {"skip": 0}))
    run.plot()
