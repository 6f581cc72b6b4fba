"""``predict``: designs read from configurations, against real random-init models, its classes and its map."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import rankscope
from rankscope._errors import InputError, LoadError, RankscopeError, UnsupportedConfigError
from rankscope.models.designs import design_of
from rankscope.results.run import load_run
from rankscope.theory.designs.design import Design
from rankscope.verbs.phase_map import axis_of, phase_map
from rankscope.verbs.sampled_design import agreement_of, crossing, follow

SMALL = Design(depth=6, width=64, heads=4, tokens=16, initial_cosine=0.3)


def strong(**changes: object) -> Design:
    return SMALL.changed(weight_std=0.08, **changes)


def test_designs_are_read_from_presets() -> None:
    bert, notes = design_of("init:bert-base")
    assert (bert.depth, bert.width, bert.heads, bert.norm_place, bert.mask) == (12, 768, 12, "post", "complete")
    assert bert.initial_cosine == pytest.approx(1 / 3)
    assert notes
    gpt, _ = design_of("gpt2")
    assert (gpt.norm_place, gpt.mask, gpt.mlp) == ("pre", "causal", "gelu_new")
    assert gpt.output_std == pytest.approx(0.02 / math.sqrt(24))
    llama, _ = design_of("tiny-llama")
    assert (llama.norm, llama.mlp, llama.positions) == ("rmsnorm", "swiglu", "rope")


def test_designs_are_read_from_a_file(tmp_path: Path) -> None:
    facts = {"model_type": "bert", "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    for spec in (tmp_path, tmp_path / "config.json"):
        design, _ = design_of(spec)
        assert (design.depth, design.width, design.head_dim) == (3, 48, 12)


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        ({"model_type": "t5"}, UnsupportedConfigError),
        ({"model_type": "bert", "num_hidden_layers": -1}, InputError),
        ({"model_type": "bert", "hidden_act": "mish"}, UnsupportedConfigError),
        ({"model_type": "nonsense"}, LoadError),
    ],
)
def test_configurations_that_are_not_understood_are_refused(tmp_path: Path, facts: dict, error: type) -> None:
    (tmp_path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(error):
        design_of(tmp_path)


def test_specs_that_lead_nowhere_say_so(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no config\.json"):
        design_of(tmp_path / "missing")
    with pytest.raises(RankscopeError, match="Did you mean"):
        design_of("bert-bse")


@pytest.mark.parametrize("preset", ["tiny-bert", "tiny-gpt2", "tiny-llama"])
def test_the_sampled_curve_is_that_of_real_models(preset: str) -> None:
    """Mean log10 residual over 10 random models on distinct words, by block, within five standard errors."""
    tokens = 12
    design, _ = design_of(preset)
    real = []
    for seed in range(10):
        loaded = rankscope.load(f"init:{preset}", seed=seed)
        ids = torch.randperm(60, generator=torch.Generator().manual_seed(seed))[:tokens].unsqueeze(0) + 4
        run = rankscope.exact(loaded.model, {"input_ids": ids}, plain=False)
        real.append(run.curve("log10_relative_residual", "block.out").mean)
    seen = np.array(real)
    runs = [follow(design, 500 + s, tokens, design.depth, design.depth).log10_relative[1:] for s in range(30)]
    foretold = np.array(runs)
    error = np.sqrt(seen.var(0, ddof=1) / len(seen) + foretold.var(0, ddof=1) / len(foretold))
    assert (np.abs(seen.mean(0) - foretold.mean(0)) < 5 * error).all()


def test_without_skips_order_three_and_a_depth() -> None:
    run = rankscope.predict(strong(), {"skip_gain": 0.0}, seeds=3)
    assert run.extra["class"]["name"] == "order 3"
    assert run.extra["agreement"]["block"] in (2, 3)
    logs = follow(strong(skip_gain=0.0), 0, 16, 6, 6).log10_relative
    assert (logs[6] - logs[5]) / (logs[5] - logs[4]) == pytest.approx(3, abs=0.02)
    assert run.verdict.startswith("Order 3")


def test_a_mask_leaves_order_one_with_its_second_eigenvalue() -> None:
    """Pure attention under a causal mask: 1/2 times the growth of the values, relative to a stream that grows alike."""
    design = strong(skip_gain=0.0, mlp="none", norm="none", norm_place="none", mask="causal", depth=40)
    run = rankscope.predict(design, seeds=6)
    assert run.extra["class"]["name"] == "order 1"
    assert run.extra["class"]["factor"] == pytest.approx(0.5, abs=0.03)


def test_pre_norm_is_slower_than_exponential() -> None:
    run = rankscope.predict(strong(norm_place="pre"), seeds=2, most_blocks=12)
    assert run.extra["class"]["name"] == "slower than exponential"
    assert run.extra["agreement"]["depth"] is None
    assert "0 of 2 seeds" in run.verdict


def test_without_values_nothing_collapses() -> None:
    run = rankscope.predict(strong(mlp="none"), {"value_std": 0.0}, seeds=1, most_blocks=6)
    assert run.extra["class"]["name"] == "no collapse"


def test_the_mean_field_foretells_the_sampled_depth() -> None:
    """Width 512: the oracle's depth lies within 10% of the mean over four seeds."""
    design = Design(depth=8, width=512, heads=8, tokens=16, initial_cosine=1 / 3)
    run = rankscope.predict(design, {"skip_gain": 0.5, "weight_std": 0.024}, seeds=4)
    oracle = next(one for one in run.extra["oracles"] if one["oracle"] == "mean_field")
    assert oracle["agreement_depth"] == pytest.approx(run.extra["agreement"]["depth"], rel=0.1)


def test_the_run_keeps_everything(tmp_path: Path) -> None:
    run = rankscope.predict(strong(), seeds=2, most_blocks=8, map=("skip_gain=0:1:3", "depth=1:6:4"))
    assert set(run.table["curve"].to_pylist()) >= {"sampled", "mean_field"}
    assert {"design", "class", "agreement", "oracles", "map"} <= set(run.to_json())
    json.dumps(run.to_json(), allow_nan=False)
    run.save(tmp_path / "run")
    again = load_run(tmp_path / "run")
    assert str(again) == str(run)
    again.plot().savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_map_is_the_curve_of_each_cell() -> None:
    design = SMALL
    found = phase_map(design, axis_of("skip_gain=0.5,1", design), axis_of("depth=2,5", design), 16)
    assert found["engine"] == [["mean_field", "mean_field"], ["mean_field", "mean_field"]]
    turned = phase_map(design, axis_of("depth=2,5", design), axis_of("skip_gain=0.5,1", design), 16)
    values = np.array(found["log10_relative_residual"])
    assert values.shape == (2, 2)
    np.testing.assert_array_equal(values, np.array(turned["log10_relative_residual"]).T)
    assert values[1, 0] < values[0, 0]
    assert values[1, 0] < values[1, 1]


def test_a_map_outside_the_oracle_is_sampled() -> None:
    found = phase_map(SMALL, axis_of("mask=complete,causal", SMALL), axis_of("norm_place=pre,post,none", SMALL), 16)
    assert {row[1] for row in found["engine"]} == {"sampled"}


@pytest.mark.parametrize(
    "written", ["colour", "depth=1", "depth=1:2:1", "depth=a:b", "mask", "skip_gain=0:1:1000", "remedy"]
)
def test_axes_that_are_none(written: str) -> None:
    with pytest.raises(InputError, match=r"Expected|needs"):
        axis_of(written, SMALL)


def test_refusals() -> None:
    with pytest.raises(InputError, match="two parameters"):
        rankscope.predict(SMALL, seeds=1, map=("depth", "depth"), most_blocks=6)
    with pytest.raises(InputError, match="seeds"):
        rankscope.predict(SMALL, seeds=0)
    with pytest.raises(InputError, match="remedy"):
        rankscope.predict(SMALL.changed(remedy="deepnorm"))
    with pytest.raises(InputError, match="has no 'colour'"):
        rankscope.predict(SMALL, {"colour": 1})


def test_agreement_is_read_between_blocks() -> None:
    assert crossing(np.array([-4.0]), -3.0) == 0.0
    assert math.isinf(crossing(np.array([0.0, -1.0]), -3.0))
    assert crossing(np.array([0.0, -np.inf]), -3.0) == 1.0
    runs = [follow(strong(skip_gain=0.0), seed, 16, 4, 4) for seed in (0, 1)]
    found = agreement_of(runs)
    assert found.block == math.ceil(found.depth or 0)
    assert agreement_of(runs, level=1e-300).depth is None
