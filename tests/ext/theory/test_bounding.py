"""bound() on small models of many families, whole and cut, with weights alone, and where it must refuse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import rankscope as rs
from rankscope.errors import InputError, UnsupportedConfigError
from rankscope.ext.theory.bound.judge import grid_of, theorems_in
from rankscope.ext.theory.bound.reading import mlp_size
from rankscope.ext.theory.theorems import THEOREMS, Evaluation, LayerQuantities, Network
from rankscope.models.loading import load
from rankscope.models.pretrained import pretrained_folder
from tests.ext.theory.theorems.test_wu_2024 import alternating_trees

FAMILIES = ("bert", "gpt2", "llama", "albert", "qwen3", "gpt-neox", "t5", "bloom", "vit", "opt")
PURE = {"skip": 0.0, "mlp": "drop", "norm": "identity"}


def inside(run: rs.Run, theorem: str = "contraction_interval") -> np.ndarray:
    grid = grid_of(run.table, theorem)
    lower, value, upper = (grid.values[f"log10_{name}"] for name in ("lower_bound", "measured", "bound"))
    return (lower <= value) & (value <= upper)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_interval_contains_the_measured_contraction_at_every_layer(name: str) -> None:
    run = rs.bound(f"init:tiny-{name}", rs.Inputs(sequences=2, tokens=12), theorems=["contraction_interval"])
    assert inside(run).size >= 2
    assert inside(run).all()


def test_the_contraction_is_that_of_the_model_itself() -> None:
    """From the residuals that a hook sees before and after BERT's attention output."""
    loaded = load("init:tiny-bert", dtype="float64")
    seen: list[torch.Tensor] = []
    modules = dict(loaded.model.named_modules())
    hooks = [
        modules["encoder.layer.1.attention.self"].register_forward_hook(lambda m, a, o: seen.append(a[0])),
        modules["encoder.layer.1.attention.output.dense"].register_forward_hook(lambda m, a, o: seen.append(o)),
    ]
    ids = torch.randint(5, 60, (2, 9))
    with torch.no_grad():
        loaded.model(ids)
    for hook in hooks:
        hook.remove()
    sizes = [torch.linalg.vector_norm(x - x.mean(1, keepdim=True), dim=(1, 2)) for x in seen]
    run = rs.bound(loaded.model, ids, theorems=["contraction_interval"])
    grid = grid_of(run.table, "contraction_interval")
    expected = (sizes[1] / sizes[0]).log10().numpy()
    assert grid.values["log10_measured"][1] == pytest.approx(expected, rel=1e-7)


def test_padding_is_left_out() -> None:
    loaded = load("init:tiny-bert", dtype="float64")
    ids = torch.randint(5, 60, (1, 10))
    padded = torch.cat((ids, torch.zeros(1, 6, dtype=torch.long)), 1)
    mask = (torch.arange(16) < 10).long()[None]
    bare = rs.bound(loaded.model, {"input_ids": ids})
    longer = rs.bound(loaded.model, {"input_ids": padded, "attention_mask": mask})
    for theorem in ("contraction_interval", "dong_2021_multi_head", "wu_2024_masks"):
        for metric in ("log10_bound", "log10_measured"):
            a, b = (grid_of(run.table, theorem).values[metric] for run in (bare, longer))
            assert a == pytest.approx(b, rel=1e-9), (theorem, metric)


def test_attention_alone_meets_the_hypotheses_of_the_collapse_theorem_and_its_bound_holds() -> None:
    model = load("init:tiny-bert", dtype="float64").model
    with rs.operate(model, rs.Surgery(**PURE)):
        run = rs.bound(model, rs.Inputs(sequences=2, tokens=12))
    for theorem in ("dong_2021_multi_head", "contraction_interval", "cubic_law_interval"):
        assert run.extra["applies"][theorem], run.extra["failed_hypotheses"][theorem]
        grid, depth = (grid_of(run.table, theorem, scope) for scope in ("layer", "depth"))
        rounding = np.nan_to_num(grid.values["log10_rounding"])
        assert (grid.values["log10_slack"] >= -rounding)[~grid.floor].all()
        assert (rounding[~grid.floor] < 0.3).all()
        assert theorem == "cubic_law_interval" or (depth.values["log10_slack"][~depth.floor] >= 0).all()
    assert not run.extra["applies"]["dong_2021_skip"]


def test_with_skips_the_collapse_theorem_says_that_it_does_not_apply() -> None:
    run = rs.bound(
        "init:tiny-bert", rs.Inputs(sequences=1, tokens=12), theorems=["dong_2021_multi_head", "skip_interval"]
    )
    assert run.extra["failed_hypotheses"]["dong_2021_multi_head"] == ("attention alone (no skip, MLP or norm)",)
    assert inside(run, "skip_interval").all()


def test_the_stacks_of_an_encoder_and_a_decoder_are_kept_apart() -> None:
    run = rs.bound("init:tiny-t5", rs.Inputs(sequences=1, tokens=12), theorems=["contraction_interval"])
    depth = sum(grid_of(run.table, "contraction_interval", stack=name).layers.size for name in ("encoder", "decoder"))
    assert f"in {depth} of {depth} cases" in run.verdict
    assert run.extra["sentences"]["contraction_interval"].startswith("Encoder: ")


def test_rotary_positions_and_a_causal_mask_silence_the_complete_mask_theorems() -> None:
    run = rs.bound(
        "init:tiny-llama", rs.Inputs(sequences=1, tokens=12), theorems=["dong_2021_multi_head", "cubic_law_interval"]
    )
    failed = run.extra["failed_hypotheses"]["dong_2021_multi_head"]
    assert "scores without positions or norms" in failed
    assert "every row sees every token" in failed
    assert np.isnan(grid_of(run.table, "cubic_law_interval").values["log10_bound"]).all()


def test_every_theorem_has_rows_and_a_sentence_and_the_run_survives_its_files(tmp_path: Path) -> None:
    run = rs.bound("init:tiny-bert", rs.Inputs(sequences=1, tokens=12))
    assert set(theorems_in(run.table)) == set(THEOREMS)
    assert set(run.extra["sentences"]) == set(THEOREMS)
    again = rs.load_run(run.save(tmp_path / "run"))
    assert again.verdict == run.verdict
    assert str(again) == str(run)
    rows = run.to_json()["rows"]
    assert {"theorem", "scope"} <= set(rows[0])
    assert any(row.get("hypothesis") and row["metric"] == "margin" for row in rows)


def test_a_family_without_heads_and_a_module_without_a_family_are_refused_with_a_sentence() -> None:
    with pytest.raises(UnsupportedConfigError, match="heads of 'mamba' cannot be read"):
        rs.bound("init:tiny-mamba", rs.Inputs(sequences=1, tokens=8))
    with pytest.raises(UnsupportedConfigError, match="not a transformers model"):
        rs.bound(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), torch.randn(1, 4, 8))


def test_one_token_has_no_residual() -> None:
    with pytest.raises(InputError, match="at least two tokens"):
        rs.bound("init:tiny-gpt2", torch.tensor([[5]]))


@pytest.mark.slow
@pytest.mark.pretrained
def test_minilm_lies_inside_the_interval_at_every_layer() -> None:
    run = rs.bound(pretrained_folder("minilm"), rs.Inputs(sequences=1, tokens=32))
    assert inside(run).shape == (6, 1)
    assert inside(run).all()
    grid = grid_of(run.table, "contraction_interval")
    assert (grid.values["log10_slack"] < 1.5).all()
    assert (grid_of(run.table, "dong_2021_multi_head").values["log10_slack"] > 6).all()
    assert math.isfinite(float(grid.values["log10_width"].max()))


def test_gpt_oss_with_sinks_is_measured_on_the_module_and_lies_inside() -> None:
    """Rows that miss 1 by 2 percent: what the tokens share leaks, and is ten times what attention makes of R."""
    model = load("init:tiny-gpt-oss").model
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.sinks.fill_(-4.2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 32, generator=generator) + 1e-3 * torch.randn(1, 16, 32, generator=generator)
    ratios: list[float] = []

    def measure(module: torch.nn.Module, args: tuple, kwargs: dict, out: tuple) -> None:
        read, given = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]), out[0]
        sizes = [float(torch.linalg.vector_norm(y.double() - y.double().mean(1, keepdim=True))) for y in (given, read)]
        ratios.append(math.log10(sizes[0] / sizes[1]))

    hooks = [layer.self_attn.register_forward_hook(measure, with_kwargs=True) for layer in model.layers]
    with torch.no_grad():
        model(inputs_embeds=x)
    for hook in hooks:
        hook.remove()
    run = rs.bound(model, {"inputs_embeds": x}, theorems=["contraction_interval", "wu_2024_masks"])
    grid = grid_of(run.table, "contraction_interval")
    assert grid.values["log10_measured"][:, 0] == pytest.approx(ratios, rel=1e-6)
    assert inside(run).all()
    assert (grid.values["log10_slack"] < 0.5).all()
    assert run.extra["code"] == "holds"
    assert "Rows of attention miss 1 by up to 0.0" in run.extra["sentences"]["contraction_interval"]
    assert "rows of attention add up to one" in run.extra["failed_hypotheses"]["wu_2024_masks"]


def test_wu_2024_masks_holds_where_each_layer_has_its_own_mask() -> None:
    """BERT with identity values and uniform attention under trees that change places: once 3.58 bounded 10.32."""
    from transformers import BertConfig, BertModel

    n, dim, depth = 16, 8, 8
    config = BertConfig(
        vocab_size=50,
        hidden_size=dim,
        num_hidden_layers=depth,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=32,
        attn_implementation="eager",
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    model = BertModel(config, add_pooling_layer=False).double().eval()
    eye = torch.eye(dim, dtype=torch.float64)
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.zero_()
        model.embeddings.token_type_embeddings.weight.zero_()
        for layer in model.encoder.layer:
            own = layer.attention.self
            for module in (own.query, own.key, own.value, layer.attention.output.dense):
                module.weight.copy_(0 * eye if module in (own.query, own.key) else eye)
                module.bias.zero_()
    hooks = []
    for layer, mask in zip(model.encoder.layer, alternating_trees(depth, n), strict=True):
        added = torch.zeros(1, 1, n, n, dtype=torch.float64).masked_fill(~mask, -torch.inf)
        hooks.append(
            layer.register_forward_pre_hook(
                lambda module, args, kwargs, added=added: (
                    ((args[0], added, *args[2:]), kwargs)
                    if len(args) > 1
                    else (args, {**kwargs, "attention_mask": added})
                ),
                with_kwargs=True,
            )
        )
    row = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    tokens = torch.cat((row.expand(8, dim), -row.expand(8, dim)))[None]
    with rs.operate(model, rs.Surgery(**PURE)):
        run = rs.bound(model, rs.Inputs({"inputs_embeds": tokens}, tokens=n), theorems=["wu_2024_masks"])
    for hook in hooks:
        hook.remove()
    assert run.extra["applies"]["wu_2024_masks"], run.extra["failed_hypotheses"]
    grid = grid_of(run.table, "wu_2024_masks", "depth")
    assert 10 ** grid.values["log10_measured"][0, 0] == pytest.approx(10.32, abs=0.01)
    assert (grid_of(run.table, "wu_2024_masks").values["log10_slack"] >= 0).all()


def test_a_violated_bound_is_the_first_sentence_of_the_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = THEOREMS["contraction_interval"]

    def wrong(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
        found = plain.function(network, layers)
        low = [replace(b, log_upper=b.log_measured - 1.0) if b.layer == 1 else b for b in found.layers]
        return replace(found, layers=tuple(low))

    monkeypatch.setitem(THEOREMS._entries, "contraction_interval", replace(plain, function=wrong))
    run = rs.bound("init:tiny-bert", rs.Inputs(sequences=2, tokens=8), theorems=["contraction_interval"])
    assert run.verdict.startswith(
        "Violated: a bound is broken with every hypothesis met, contraction_interval in block 1"
    )
    assert "and 1 more" in run.verdict
    assert run.extra["code"] == "violated"
    assert [e["layer"] for e in run.evidence if "layer" in e] == [1, 1]
    assert "Verdict: Violated:" in str(run)
    again = rs.load_run(run.save(tmp_path / "run"))
    assert again.extra["code"] == "violated"


def test_a_bound_that_is_broken_where_a_hypothesis_fails_is_no_alarm() -> None:
    run = rs.bound("init:tiny-bert", rs.Inputs(sequences=1, tokens=8))
    assert run.extra["code"] == "holds"
    assert "Violated" not in run.verdict
    assert not run.extra["applies"]["wu_2024_masks"]


def test_a_model_that_gives_numbers_that_are_not_finite_is_refused() -> None:
    model = load("init:tiny-gpt2", dtype="float64").model
    with torch.no_grad():
        model.h[1].mlp.c_proj.bias.fill_(torch.inf)
    with pytest.raises(InputError, match="Block 1 returns values that are not finite"):
        rs.bound(model, torch.randint(5, 60, (1, 6)), theorems=["wu_2024_masks"])


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "gpt-neox", "granite", "cohere", "xlnet"])
def test_what_attention_gives_is_seen_before_norms_and_gains_and_beside_parallel_mlps(name: str) -> None:
    run = rs.bound(f"init:tiny-{name}", rs.Inputs(sequences=1, tokens=10), theorems=["contraction_interval"])
    assert run.extra["applies"]["contraction_interval"], run.extra["failed_hypotheses"]
    assert np.isfinite(grid_of(run.table, "contraction_interval").values["log10_measured"]).all()
    assert inside(run).all()


def test_a_gated_mlp_is_certified_only_behind_a_norm_and_without_biases() -> None:
    """OLMo 2 norms what its MLP gives, not what it reads; a bias lets the gate be larger than its input allows."""
    from transformers import LlamaConfig, LlamaModel

    olmo = load("init:tiny-olmo2")
    assert mlp_size(olmo.model.layers[0], olmo.config)[0] is None
    sizes = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, mlp_bias=True)
    found, note = mlp_size(LlamaModel(config).layers[0], config)
    assert found is None
    assert "has biases (gate_proj, up_proj)" in note
    plain = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    known, _ = mlp_size(LlamaModel(plain).layers[0], plain)
    assert known is not None
    assert known.radius == pytest.approx(8**0.5)


def test_the_shift_of_the_norm_before_a_gated_mlp_counts_in_its_radius() -> None:
    stable = load("init:tiny-stablelm")
    block = stable.model.layers[0]
    before, _ = mlp_size(block, stable.config)
    assert before is not None
    with torch.no_grad():
        block.post_attention_layernorm.bias.fill_(2.0)
    after, _ = mlp_size(block, stable.config)
    assert after.radius - before.radius == pytest.approx(2.0 * block.post_attention_layernorm.bias.numel() ** 0.5)
