"""``measure`` against numbers taken by hand from the model's own hidden states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rankscope import Inputs, Model
from rankscope.errors import InputError, UnknownNameError
from rankscope.metrics.residual import relative_residual
from rankscope.metrics.stable_rank import stable_rank
from rankscope.models.loading import load
from rankscope.runs.run import Run
from rankscope.verbs.measure.run import measure
from tests.own_models import GPT, ids


def values(run: Run, metric: str, site: str) -> np.ndarray:
    rows = run.select(metric=metric, site=site)
    layers = rows["layer"].to_numpy()
    return np.stack([rows["value"].to_numpy()[layers == layer] for layer in np.unique(layers)])


def test_values_are_those_of_the_models_own_hidden_states() -> None:
    model = load("init:tiny-bert").model
    tokens = ids(5, 9)
    run = measure(model, Inputs(tokens, batch=2))
    with torch.no_grad():
        states = model(input_ids=tokens, output_hidden_states=True).hidden_states
    assert torch.equal(torch.tensor(values(run, "relative_residual", "block.in")[0]), relative_residual(states[0]))
    for layer, state in enumerate(states[1:]):
        for metric in (relative_residual, stable_rank):
            seen = values(run, metric.__name__, "block.out")[layer]
            assert np.allclose(seen, metric(state).numpy(), rtol=1e-9, atol=0), (layer, metric.__name__)


def test_attention_rows_have_one_value_per_head() -> None:
    run = measure("init:tiny-llama", Inputs(sequences=2, tokens=10))
    rows = run.select(metric="attention_entropy", site="attention.probs", layer=0)
    assert set(rows["head"].to_pylist()) == {0, 1, 2, 3}
    assert rows.num_rows == 2 * 4


def test_causal_entropy_is_normalised_by_what_each_row_may_see() -> None:
    model = GPT("pre")
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.qkv.weight)
    run = measure(model, ids(2, 7))
    assert np.allclose(values(run, "attention_entropy", "attention.probs"), 1.0, rtol=1e-6)


def test_padding_does_not_count() -> None:
    texts = ["one two three four five six seven eight", "one two three"]
    together = measure("init:tiny-bert", texts)
    alone = [measure("init:tiny-bert", [text]) for text in texts]
    for metric in ("relative_residual", "stable_rank", "mean_cosine", "attention_entropy"):
        site = "attention.probs" if metric.startswith("attention") else "block.out"
        for layer in range(3):
            rows = together.select(metric=metric, site=site, layer=layer)
            for sequence, single in enumerate(alone):
                mine = rows["value"].to_numpy()[rows["sequence"].to_numpy() == sequence]
                expected = single.select(metric=metric, site=site, layer=layer)["value"].to_numpy()
                assert np.allclose(mine, expected, rtol=2e-5, atol=0), (metric, layer, sequence)


def test_the_first_token_can_be_left_out() -> None:
    model = load("init:tiny-vit").model
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    run = measure(model, Inputs({"pixel_values": pixels}, tokens_policy="no-first"), metrics=["relative_residual"])
    with torch.no_grad():
        state = model(pixel_values=pixels, output_hidden_states=True).hidden_states[1]
    expected = relative_residual(state[:, 1:]).numpy()
    assert np.allclose(values(run, "relative_residual", "block.out")[0], expected, rtol=1e-9)


def test_stacks_of_an_encoder_decoder_are_kept_apart() -> None:
    run = measure("init:tiny-t5", Inputs(sequences=2, tokens=12))
    assert set(run.table["stack"].unique().to_pylist()) == {"encoder", "decoder"}
    assert set(run.curve("relative_residual", "block.out", stack="decoder").layers.tolist()) == {0, 1}


def test_the_model_is_left_as_it_was_found() -> None:
    model = load("init:tiny-bert").model.train()
    model.encoder.layer[1].eval()
    before = [module.training for module in model.modules()]
    state = torch.random.get_rng_state()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    measure(model, ids(2, 9))
    assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_float_floor_is_said() -> None:
    run = measure(Model("init:tiny-bert", dtype="bfloat16"), Inputs(sequences=1, tokens=8))
    assert run.floor["dtype"] == "bfloat16"
    assert run.floor["relative"] == 4 * 2.0**-7


def test_the_null_is_that_of_gaussian_tokens() -> None:
    run = measure("init:tiny-bert", Inputs(sequences=2, tokens=30), null=True)
    null = run.null["correlation"]
    assert abs(null["mean"]) < 5 * max(null["sd"], 1e-3)
    assert "mu" not in run.null


def test_names_are_checked_before_anything_runs() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'stable_rank'"):
        measure("init:tiny-bert", metrics=["stabel_rank"])
    with pytest.raises(UnknownNameError, match=r"no site named 'block.ot'.*'block.out'"):
        measure("init:tiny-bert", sites=["block.ot"])
    with pytest.raises(InputError, match=r"after '@' come block numbers"):
        measure("init:tiny-bert", sites=["block.out@last"])
    with pytest.raises(InputError, match=r"None of the metrics \(stable_rank\)"):
        measure("init:tiny-bert", Inputs(sequences=1, tokens=8), metrics=["stable_rank"], sites=["attention.probs"])


def test_a_run_survives_saving(tmp_path) -> None:
    run = measure("init:tiny-gpt2", Inputs(sequences=2, tokens=10), null=True)
    run.save(tmp_path / "run")
    again = Run.load(tmp_path / "run")
    assert again.to_json() == run.to_json()


def test_next_steps_name_a_loaded_model_as_it_was_asked_for() -> None:
    loaded = load("init:tiny-bert")
    assert Model(loaded).spec == "init:tiny-bert"
    assert Model(load(loaded.model)).spec is Model(loaded.model).spec is None


class AlwaysOn(torch.nn.Module):
    """Dropout that does not end in evaluation mode."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, self.share, training=True)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_random_numbers_in_evaluation_mode_are_told(share: float) -> None:
    model = GPT()
    model.blocks[1].mlp.append(AlwaysOn(share))
    run = measure(model, ids())
    told = [note for note in run.notes if "random numbers in evaluation mode" in note]
    assert len(told) == (share > 0)
    assert all("first in what blocks.1.mlp.3 returns" in note for note in told)
