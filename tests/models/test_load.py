"""Loading: every kind of spec, determinism, provenance, and errors that say what to do."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from rankscope.errors import LoadError, UnknownNameError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.inputs.record import Batch
from rankscope.models.loading import load
from rankscope.models.loading.config import config_from_json, config_hash
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.presets import PRESETS
from tests.tiny_presets import TINY_PRESETS


def state(spec: str, **choices: object) -> dict[str, torch.Tensor]:
    return load(spec, **choices).model.state_dict()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("bert")
    load("init:tiny-bert", seed=7).model.save_pretrained(where)
    return where


def test_a_module_in_memory_is_kept_as_it_is() -> None:
    module = torch.nn.Linear(3, 2)
    loaded = load(module)
    assert loaded.model is module
    assert module.training
    assert (loaded.origin, loaded.input_kind, loaded.config, loaded.parameters) == ("memory", "tensors", None, 8)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TINY_PRESETS)
def test_initialisation_is_the_seed_and_nothing_else(name: str) -> None:
    before, numpy_before, python_before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    one = state(f"init:{name}")
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    assert random.getstate() == python_before
    torch.manual_seed(123)
    again, other = state(f"init:{name}"), state(f"init:{name}", seed=1)
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-llama", "tiny-swinv2", "tiny-mamba2", "tiny-t5"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_dtypes_share_their_weights_up_to_rounding(name: str, dtype: str) -> None:
    single, other = state(f"init:{name}"), state(f"init:{name}", dtype=dtype)
    for key, value in single.items():
        if value.is_floating_point():
            assert torch.equal(value.to(other[key].dtype), other[key])
    assert load(f"init:{name}", dtype=dtype).dtype == dtype
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in TINY_PRESETS if name not in ("tiny-xlnet", "tiny-mra")])
def test_every_twin_runs_in_float64_too(name: str) -> None:
    loaded = load(f"init:{name}", dtype="float64")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float64}
    prepared = prepare_inputs(loaded, sequences=1, tokens=8)
    with torch.no_grad(), quiet_transformers():
        output = prepared[0].run(loaded.model)[0]
    assert output.dtype is torch.float64
    assert torch.isfinite(output).all()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_model_that_runs_in_float32_only_is_refused_in_another(dtype: str) -> None:
    with pytest.raises(LoadError, match="Load it in float32"):
        load("init:tiny-xlnet", dtype=dtype)


def test_a_folder_gives_back_the_weights_that_were_saved(folder: Path) -> None:
    loaded, made = load(folder), state("init:tiny-bert", seed=7)
    assert all(torch.equal(made[key], value) for key, value in loaded.model.state_dict().items())
    assert (loaded.origin, loaded.seed, loaded.tokenizer, loaded.notes) == ("folder", None, None, ())
    assert not loaded.model.training


@pytest.mark.parametrize("name", TINY_PRESETS)
def test_the_configuration_of_every_family_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    entry = PRESETS[name]
    with quiet_transformers():
        written = AutoConfig.for_model(entry.model_type, **entry.config)
        written.save_pretrained(tmp_path)
        found = config_from_json(tmp_path / "config.json", None)
    assert config_hash(found) == config_hash(type(written).from_pretrained(tmp_path))


def test_the_config_hash_is_of_the_architecture(folder: Path) -> None:
    same = {
        load(folder).config_hash,
        load("init:tiny-bert").config_hash,
        load("init:tiny-bert", dtype="float64").config_hash,
    }
    assert len(same) == 1
    assert load("init:tiny-roberta").config_hash not in same


def test_init_of_a_folder_or_a_config_file_draws_new_weights(folder: Path) -> None:
    drawn = state(f"init:{folder}", seed=7)
    assert all(torch.equal(value, drawn[key]) for key, value in state("init:tiny-bert", seed=7).items())
    assert load(f"init:{folder / 'config.json'}", seed=7).origin == "init"


def test_weights_the_checkpoint_lacks_are_drawn_from_the_seed_and_said(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    kept = {
        key: value for key, value in load_file(folder / "model.safetensors").items() if not key.startswith("pooler")
    }
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    first, second, other = load(tmp_path, seed=1), load(tmp_path, seed=1), load(tmp_path, seed=2)
    assert "pooler.dense.weight" in first.notes[0]
    assert first.seed == 1
    weights = [model.model.state_dict()["pooler.dense.weight"] for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"something.else": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(LoadError, match="None of the weights"):
        load(tmp_path)


def test_a_folder_that_lacks_most_weights_is_refused(tmp_path: Path) -> None:
    """What is not there would be drawn at random, and that measured."""
    from safetensors.torch import load_file, save_file

    load("init:tiny-bert").model.save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    few = {name: tensor for name, tensor in whole.items() if name.startswith("embeddings.")}
    save_file(few, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=f"Only {len(few)} of the {len(whole)} weights of a BertModel are in"):
        load(tmp_path)


@pytest.mark.parametrize(("name", "named"), [("t5-encoder", "T5EncoderModel"), ("siglip-text", "SiglipTextModel")])
def test_a_folder_of_another_class_names_it_and_loads_with_it(name: str, named: str, tmp_path: Path) -> None:
    load(f"init:tiny-{name}").model.save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=f"pass model_class='{named}', which its config.json names"):
        load(str(tmp_path))
    assert type(load(str(tmp_path), model_class=named).model).__name__ == named


def test_a_config_without_model_type_is_read_from_its_architectures_or_from_model_class(
    folder: Path, tmp_path: Path
) -> None:
    raw = json.loads((folder / "config.json").read_text())
    del raw["model_type"]
    target = tmp_path / "config.json"
    raw["architectures"] = ["BertForMaskedLM"]
    target.write_text(json.dumps(raw))
    assert load(f"init:{tmp_path}").config.model_type == "bert"  # type: ignore[union-attr]
    raw["architectures"] = None
    target.write_text(json.dumps(raw))
    with pytest.raises(LoadError, match='model_class="BertForMaskedLM"'):
        load(f"init:{tmp_path}")
    assert type(load(f"init:{tmp_path}", model_class="BertForMaskedLM").model).__name__ == "BertForMaskedLM"


def test_errors_say_what_to_do(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="tiny-bert"):
        load("init:tiny-brt")
    with pytest.raises(LoadError, match="no file or folder"):
        load("./no/such/folder")
    with pytest.raises(LoadError, match="to initialise"):
        load("init:./no/config.json")
    with pytest.raises(LoadError, match=r"no config\.json"):
        load(tmp_path)
    with pytest.raises(LoadError, match="init:"):
        load(folder / "config.json")
    with pytest.raises(LoadError, match="float32"):
        load("init:tiny-bert", dtype="float31")
    with pytest.raises(LoadError, match="not a model class"):
        load("init:tiny-bert", model_class="os")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match=r"hub cannot be reached.*init:gpt2"):
        load("gpt2")
    monkeypatch.chdir(folder.parent)
    with pytest.raises(LoadError, match=rf"Did you mean the folder \./{folder.name}\?"):
        load(f"{folder.name}x")


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff\xfe", "not UTF-8"), (b"{", "not valid JSON"), (b"[1]", "an object"), (b"{}", "model_type")],
)
def test_a_damaged_config_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(LoadError, match=said):
        load(f"init:{tmp_path}")


def test_transformers_verbosity_is_put_back() -> None:
    from transformers.utils import logging

    logging.set_verbosity_info()
    load("init:tiny-mamba")
    assert logging.get_verbosity() == logging.INFO
    logging.set_verbosity_warning()
    assert logging.is_progress_bar_enabled()


class Constant(torch.nn.Module):
    """Adds a constant that it makes in torch's default dtype, as decays of linear attention are made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight + 0.9 ** torch.arange(3)


def test_a_float64_module_of_ones_own_makes_its_constants_as_it_does_without_us() -> None:
    model, given = Constant(), torch.zeros(1, 3, dtype=torch.float64)
    batch = Batch({}, None, 0, 1, (given,))
    assert torch.equal(batch.run(model), model(given))
