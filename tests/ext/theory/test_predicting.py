"""``predict``: designs read from configurations, against real random-init models, and its classes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import rankscope
from rankscope.errors import InputError, LoadError, RankscopeError, UnsupportedConfigError
from rankscope.ext.theory.designs import design_of
from rankscope.ext.theory.predict.sampled_design import agreement_of, crossing, follow
from rankscope.ext.theory.prediction import predicted_sentence
from rankscope.models.design import Design
from rankscope.runs.run import load_run

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", ["tiny-bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tiny-gpt2", "tiny-llama"))]
)
def test_the_sampled_curve_is_that_of_real_models(preset: str) -> None:
    """Mean log10 residual over 10 random models on distinct words, by block, within five standard errors."""
    tokens = 12
    design, _ = design_of(preset)
    real = []
    for seed in range(10):
        loaded = rankscope.load(f"init:{preset}", seed=seed).loaded
        ids = torch.randperm(60, generator=torch.Generator().manual_seed(seed))[:tokens].unsqueeze(0) + 4
        run = rankscope.exact(loaded.model, {"input_ids": ids}, plain=False)
        real.append(run.curve("log10_relative_residual", "block.out").mean)
    seen = np.array(real)
    runs = [follow(design.changed(tokens=tokens), 500 + s, design.depth).log10_relative[1:] for s in range(30)]
    foretold = np.array(runs)
    error = np.sqrt(seen.var(0, ddof=1) / len(seen) + foretold.var(0, ddof=1) / len(foretold))
    assert (np.abs(seen.mean(0) - foretold.mean(0)) < 5 * error).all()


def test_without_skips_order_three_and_a_depth() -> None:
    run = rankscope.predict(strong(), {"skip_gain": 0.0}, seeds=3)
    assert run.extra["class"]["name"] == "order 3"
    assert run.extra["agreement"]["block"] in (2, 3)
    logs = follow(strong(skip_gain=0.0), 0, 6).log10_relative
    assert (logs[6] - logs[5]) / (logs[5] - logs[4]) == pytest.approx(3, abs=0.02)
    assert run.verdict.startswith("Collapsed within 6 blocks. Relative residual 10^-")


@pytest.mark.slow
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
    run = rankscope.predict(strong(), seeds=2, most_blocks=8)
    assert set(run.table["curve"].to_pylist()) >= {"sampled", "mean_field"}
    assert {"design", "class", "agreement", "oracles"} <= set(run.to_json())
    json.dumps(run.to_json(), allow_nan=False)
    run.save(tmp_path / "run")
    again = load_run(tmp_path / "run")
    assert str(again) == str(run)
    again.plot().savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def simulated(design: Design, seed: int) -> np.ndarray:
    """log10 of the relative residual after each block of one network whose weights are drawn in full, in float64."""
    draw = torch.Generator().manual_seed(10_000 + seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64) * std

    def norm(x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True) if design.norm == "layernorm" else x
        return x / (x.square().mean(-1, keepdim=True) + design.norm_eps).sqrt() if design.norm != "none" else x

    def attention(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for _ in range(design.heads):
            shape = (design.width, design.head_dim)
            q, k, v = (x @ normal(*shape, std=s) for s in (design.query_std, design.key_std, design.value_std))
            scores = (q @ k.T / design.head_dim**0.5).masked_fill(~visible, -torch.inf)
            total += scores.softmax(-1) @ v @ normal(design.head_dim, design.width, std=design.output_std)
        return total

    def mlp(x: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.gelu(x @ normal(design.width, design.mlp_width, std=design.mlp_in_std))
        return inner @ normal(design.mlp_width, design.width, std=design.mlp_out_std)

    place = torch.arange(design.tokens)
    behind = place[:, None] - place
    visible = {"causal": behind >= 0, "causal_window(4)": (behind >= 0) & (behind <= 4)}.get(
        design.mask, torch.ones_like(behind, dtype=torch.bool)
    )
    rho = design.initial_cosine
    x = norm(rho**0.5 * normal(1, design.width) + (1 - rho) ** 0.5 * normal(design.tokens, design.width))
    logs = []
    for _ in range(design.depth):
        for branch, skip in ((attention, design.attention_skip), (mlp, design.mlp_skip)):
            if branch is mlp and design.mlp == "none":
                continue
            y = skip * x + branch(norm(x) if design.norm_place == "pre" else x)
            x = norm(y) if design.norm_place == "post" else y
        logs.append(math.log10(float(torch.linalg.norm(x - x.mean(0)) / torch.linalg.norm(x))))
    return np.array(logs)


LONG = Design(depth=8, width=64, heads=2, tokens=512, initial_cosine=0.2).changed(weight_std=0.1, query_key_std=0.09)
DESIGNS = {
    "causal, skips cut": LONG.changed(mask="causal", skip_gain=0.0),
    "causal window, skips cut": LONG.changed(mask="causal_window(4)", skip_gain=0.0),
    "complete, skips cut": LONG.changed(skip_gain=0.0, depth=3),
    "complete, whole, post-norm": LONG,
    "causal, whole, pre-norm": LONG.changed(mask="causal", norm_place="pre", norm="rmsnorm"),
    "pure attention": LONG.changed(skip_gain=0.0, mlp="none", depth=3),
}


@pytest.mark.slow
def test_the_interval_holds_the_truth_of_a_long_context() -> None:
    """Four networks of each design with all their weights drawn: their mean is inside, and nine networks in ten."""
    inside = []
    for design in (design.changed(tokens=length) for length in (256, 512) for design in DESIGNS.values()):
        run = rankscope.predict(design, seeds=4, most_blocks=design.depth)
        assert run.extra["sampling"] == {"tokens": design.tokens, "context": design.tokens}
        final = run.extra["final"]
        ends = np.array([simulated(design, seed)[-1] for seed in range(4)])
        assert final["low"] <= ends.mean() <= final["high"], (design, final, ends)
        inside += list((final["low"] <= ends) & (ends <= final["high"]))
    assert np.mean(inside) >= 0.9


def test_a_shorter_context_is_not_told_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual of this design of order 3 is 10^-15.4 after three blocks with 64 tokens, and 10^-11.9 with 512."""
    monkeypatch.setattr("rankscope.ext.theory.predict.sampled_design.MOST_WORK", 0.0)
    design = DESIGNS["complete, skips cut"]
    run = rankscope.predict(design, seeds=3, most_blocks=design.depth)
    assert run.verdict.startswith("Collapsed within 3 blocks at a context of 64 tokens. ")
    assert run.extra["sampling"] == {"tokens": 64, "context": 512}
    assert run.provenance.lengths == (64, 64, 64)
    assert any("tokens=512 (--tokens 512) samples all" in note for note in run.notes)
    same = rankscope.predict(design, seeds=3, tokens=64, most_blocks=design.depth)
    assert run.table.equals(same.table)


def test_no_collapse_is_not_claimed_where_seeds_cannot_tell() -> None:
    agreement = agreement_of([follow(strong(depth=2), 0, 2)])
    undecided = predicted_sentence("a design", 2, "no collapse", 0.97, agreement, -0.4, (-0.6, -0.2))
    assert "approach each other: the factor per block is 0.97 in the end, which these seeds cannot tell" in undecided
    flat = rankscope.predict(strong(mlp="none"), {"value_std": 0.0}, seeds=1, most_blocks=6)
    assert flat.verdict.startswith("No collapse within")
    assert "not seen to approach each other: the factor per block is 1 in the end." in flat.verdict


def test_each_block_cubes_only_where_it_does() -> None:
    hot = Design(depth=8, width=128, heads=4, tokens=32, mlp="none", attention_skip=0.0).changed(query_key_std=0.35)
    run = rankscope.predict(hot.changed(value_std=0.088, output_std=0.088), seeds=3, most_blocks=8)
    assert run.extra["class"]["name"] == "order 3"
    assert run.extra["final"]["mean"] > -1
    assert "Each block cubes" not in run.verdict
    assert "(order 3) once they nearly agree, which they do not" in run.verdict
    assert "Each block cubes" in rankscope.predict(strong(), {"skip_gain": 0.0}, seeds=3).verdict


def test_without_a_norm_nothing_overflows_in_silence() -> None:
    bare = strong(norm="none", norm_place="none")
    run = rankscope.predict(bare, seeds=2, most_blocks=8)
    field = next(one for one in run.extra["oracles"] if one["oracle"] == "mean_field")
    assert math.isfinite(run.extra["final"]["mean"])
    assert not field["applies"]
    assert any("stay that small" in one["assumption"] and not one["holds"] for one in field["assumptions"])
    with pytest.raises(InputError, match=r"leave the range of float64 after \d+ of 60 blocks.*norm='none'"):
        rankscope.predict(bare.changed(depth=60, weight_std=20.0), seeds=1)
    with pytest.raises(InputError, match="every token is zero"):
        rankscope.predict(bare.changed(skip_gain=0.0, value_std=0.0), seeds=1)


def test_refusals() -> None:
    with pytest.raises(InputError, match="seeds"):
        rankscope.predict(SMALL, seeds=0)
    with pytest.raises(InputError, match="has no 'remedy'"):
        rankscope.predict(SMALL.changed(remedy="deepnorm"))
    with pytest.raises(InputError, match="has no 'colour'"):
        rankscope.predict(SMALL, {"colour": 1})


def test_agreement_is_read_between_blocks() -> None:
    assert crossing(np.array([-4.0]), -3.0) == 0.0
    assert math.isinf(crossing(np.array([0.0, -1.0]), -3.0))
    assert crossing(np.array([0.0, -np.inf]), -3.0) == 1.0
    runs = [follow(strong(skip_gain=0.0, depth=4), seed, 4) for seed in (0, 1)]
    found = agreement_of(runs)
    assert found.block == math.ceil(found.depth or 0)
    assert agreement_of(runs, level=1e-300).depth is None
