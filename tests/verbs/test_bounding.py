"""bound() on small models of many families, whole and cut, with weights alone, and where it must refuse."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import rankscope as rs
from rankscope._errors import InputError, LoadError, UnknownNameError, UnsupportedConfigError
from rankscope.models.loading import load
from rankscope.models.pretrained import pretrained_folder
from rankscope.results.bounds import grid_of, theorems_in
from rankscope.theory.theorems import THEOREMS

FAMILIES = ("bert", "gpt2", "llama", "albert", "qwen3", "gpt-neox", "t5", "bloom", "vit", "opt")
PURE = {"skip": 0.0, "mlp": "drop", "norm": "identity"}


def inside(run: rs.Run, theorem: str = "contraction_interval") -> np.ndarray:
    grid = grid_of(run.table, theorem)
    lower, value, upper = (grid.values[f"log10_{name}"] for name in ("lower_bound", "measured", "bound"))
    return (lower <= value) & (value <= upper)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_interval_contains_the_measured_contraction_at_every_layer(name: str) -> None:
    run = rs.bound(f"init:tiny-{name}", sequences=2, tokens=12, theorems=["contraction_interval"], lanczos=20)
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
    run = rs.bound(loaded.model, ids, theorems=["contraction_interval"], lanczos=0)
    grid = grid_of(run.table, "contraction_interval")
    expected = (sizes[1] / sizes[0]).log10().numpy()
    assert grid.values["log10_measured"][1] == pytest.approx(expected, rel=1e-7)


def test_padding_is_left_out() -> None:
    loaded = load("init:tiny-bert", dtype="float64")
    ids = torch.randint(5, 60, (1, 10))
    padded = torch.cat((ids, torch.zeros(1, 6, dtype=torch.long)), 1)
    mask = (torch.arange(16) < 10).long()[None]
    bare = rs.bound(loaded.model, {"input_ids": ids}, lanczos=0)
    longer = rs.bound(loaded.model, {"input_ids": padded, "attention_mask": mask}, lanczos=0)
    for theorem in ("contraction_interval", "dong_2021_multi_head", "wu_2024_masks"):
        for metric in ("log10_bound", "log10_measured"):
            a, b = (grid_of(run.table, theorem).values[metric] for run in (bare, longer))
            assert a == pytest.approx(b, rel=1e-9), (theorem, metric)


def test_attention_alone_meets_the_hypotheses_of_the_collapse_theorem_and_its_bound_holds() -> None:
    model = load("init:tiny-bert", dtype="float64").model
    with rs.operate(model, **PURE):
        run = rs.bound(model, sequences=2, tokens=12)
    for theorem in ("dong_2021_multi_head", "contraction_interval", "cubic_law_interval"):
        assert run.extra["applies"][theorem], run.extra["failed_hypotheses"][theorem]
        grid, depth = (grid_of(run.table, theorem, scope) for scope in ("layer", "depth"))
        assert (grid.values["log10_slack"][~grid.floor] >= -1e-6).all()
        assert theorem == "cubic_law_interval" or (depth.values["log10_slack"][~depth.floor] >= 0).all()
    assert not run.extra["applies"]["dong_2021_skip"]


def test_with_skips_the_collapse_theorem_says_that_it_does_not_apply() -> None:
    run = rs.bound("init:tiny-bert", sequences=1, tokens=12, theorems=["dong_2021_multi_head", "skip_interval"])
    assert run.extra["failed_hypotheses"]["dong_2021_multi_head"] == ("attention alone (no skip, MLP or norm)",)
    assert inside(run, "skip_interval").all()


def test_the_stacks_of_an_encoder_and_a_decoder_are_kept_apart() -> None:
    run = rs.bound("init:tiny-t5", sequences=1, tokens=12, theorems=["contraction_interval"], lanczos=0)
    depth = sum(grid_of(run.table, "contraction_interval", stack=name).layers.size for name in ("encoder", "decoder"))
    assert f"in {depth} of {depth} cases" in run.verdict
    assert run.extra["sentences"]["contraction_interval"].startswith("Encoder: ")


def test_rotary_positions_and_a_causal_mask_silence_the_complete_mask_theorems() -> None:
    run = rs.bound("init:tiny-llama", sequences=1, tokens=12, theorems=["dong_2021_multi_head", "cubic_law_interval"])
    failed = run.extra["failed_hypotheses"]["dong_2021_multi_head"]
    assert "scores without positions or norms" in failed
    assert "every row sees every token" in failed
    assert np.isnan(grid_of(run.table, "cubic_law_interval").values["log10_bound"]).all()


def test_every_theorem_has_rows_and_a_sentence_and_the_run_survives_its_files(tmp_path: Path) -> None:
    run = rs.bound("init:tiny-bert", sequences=1, tokens=12, lanczos=8)
    assert set(theorems_in(run.table)) == set(THEOREMS)
    assert set(run.extra["sentences"]) == set(THEOREMS)
    again = rs.load_run(run.save(tmp_path / "run"))
    assert again.verdict == run.verdict
    assert str(again) == str(run)
    rows = run.to_json()["rows"]
    assert {"theorem", "scope"} <= set(rows[0])
    assert any(row.get("hypothesis") and row["metric"] == "margin" for row in rows)


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-llama", "tiny-gpt2", "tiny-albert"])
def test_weights_alone_agree_with_the_model(name: str, tmp_path: Path) -> None:
    loaded = load(f"init:{name}")
    loaded.model.save_pretrained(tmp_path)
    lazy = rs.bound(tmp_path, weights_only=True, theorems=["dong_2021_mlp", "dong_2021_multi_head"])
    grid = grid_of(lazy.table, "dong_2021_multi_head")
    whole = rs.bound(loaded.model, sequences=1, tokens=8, theorems=["dong_2021_multi_head", "dong_2021_mlp"])
    assert grid.layers.tolist() == grid_of(whole.table, "dong_2021_multi_head").layers.tolist()
    ratio = {}
    for run, label in ((lazy, "lazy"), (whole, "whole")):
        multi, mlp = (grid_of(run.table, t).values["log10_factor"] for t in ("dong_2021_multi_head", "dong_2021_mlp"))
        ratio[label] = mlp - multi
    assert ratio["lazy"] == pytest.approx(ratio["whole"], rel=1e-9)
    assert lazy.provenance.parameters is None


def test_weights_alone_never_build_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    load("init:tiny-llama").model.save_pretrained(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(transformers.PreTrainedModel, "__init__", refuse)
    run = rs.bound(tmp_path, weights_only=True)
    assert "not evaluated" in run.notes[0]
    assert "contraction_interval" not in theorems_in(run.table)


def test_weights_alone_refuse_what_needs_activations_and_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contraction_interval cannot be evaluated on weights alone"):
        rs.bound(tmp_path, weights_only=True, theorems=["contraction_interval"])
    with pytest.raises(LoadError, match="weights_only reads a local folder"):
        rs.bound("init:tiny-bert", weights_only=True)
    with pytest.raises(InputError, match="Leave it out for a module"):
        rs.bound(load("init:tiny-bert").model, weights_only=True)


def test_a_family_without_heads_and_a_module_without_a_family_are_refused_with_a_sentence() -> None:
    with pytest.raises(UnsupportedConfigError, match="heads of 'mamba' cannot be read"):
        rs.bound("init:tiny-mamba", sequences=1, tokens=8)
    with pytest.raises(UnsupportedConfigError, match="no transformers model"):
        rs.bound(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), torch.randn(1, 4, 8))


def test_an_unknown_theorem_is_named() -> None:
    with pytest.raises(UnknownNameError, match="contraction_interval"):
        rs.bound("init:tiny-bert", theorems=["contraction_intervall"])


def test_one_token_has_no_residual() -> None:
    with pytest.raises(InputError, match="two tokens or more"):
        rs.bound("init:tiny-gpt2", torch.tensor([[5]]))


def test_text_and_figure_show_every_theorem() -> None:
    run = rs.bound("init:tiny-bert", sequences=1, tokens=12, lanczos=8)
    text = str(run)
    for name in THEOREMS:
        assert f"\n{name} (" in text
    assert len(run.plot().axes) == 2


@pytest.mark.pretrained
def test_minilm_lies_inside_the_interval_at_every_layer() -> None:
    run = rs.bound(pretrained_folder("minilm"), sequences=1, tokens=32, lanczos=20)
    assert inside(run).shape == (6, 1)
    assert inside(run).all()
    grid = grid_of(run.table, "contraction_interval")
    assert (grid.values["log10_slack"] < 1.5).all()
    assert (grid_of(run.table, "dong_2021_multi_head").values["log10_slack"] > 6).all()
    assert math.isfinite(float(grid.values["log10_width"].max()))
