"""Files from a stranger: nothing in them runs unless the caller said so."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from rankscope.errors import LoadError
from rankscope.models.loading import affording, load


class _Touch:
    """Unpickling this creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.target,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    load("init:tiny-bert").model.save_pretrained(tmp_path)
    return tmp_path


def _as_pickle(folder: Path, content: object) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")


def test_a_pickle_is_refused_unless_allowed_and_then_gives_the_same_weights(folder: Path) -> None:
    made = load("init:tiny-bert").model.state_dict()
    _as_pickle(folder, made)
    with pytest.raises(LoadError, match="allow_pickle=True"):
        load(folder)
    read = load(folder, allow_pickle=True).model.state_dict()
    assert all(torch.equal(value, read[key]) for key, value in made.items())


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_an_allowed_pickle_does_not_run(folder: Path, zipped: bool) -> None:
    marker = folder / "was-run"
    _as_pickle(folder, {"weight": _Touch(marker)})
    if not zipped:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": _Touch(marker)}))
    with pytest.raises(LoadError, match="could not be read"):
        load(folder, allow_pickle=True)
    assert not marker.exists()


@pytest.mark.parametrize("spec", ["init:{}", "{}"])
@pytest.mark.parametrize("model_type", ["bert", "never-heard-of"])
def test_remote_code_named_by_a_config_does_not_run(folder: Path, spec: str, model_type: str) -> None:
    marker = folder / "was-run"
    (folder / "modeling_own.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nclass Own: ...\nclass OwnConfig: ...\n"
    )
    raw = json.loads((folder / "config.json").read_text())
    raw["model_type"] = model_type
    raw["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["modeling_own.Own", None]}})
    )
    if model_type == "bert":
        assert type(load(spec.format(folder)).model).__name__ == "BertModel"
    else:
        with pytest.raises(LoadError, match="trust_remote_code"):
            load(spec.format(folder))
    assert not marker.exists()


@pytest.mark.parametrize("spec", ["init:{}", "{}"])
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_an_attention_kernel_from_elsewhere_is_not_fetched(folder: Path, spec: str, key: str) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw[key] = "stranger/kernel"
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(LoadError, match="stranger/kernel"):
        load(spec.format(folder))


def test_architectures_naming_something_else_than_a_model_are_refused(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    del raw["model_type"]
    raw["architectures"] = ["pipeline"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(LoadError, match="not a model class"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_hidden_layers": 10**9}, "1,000,000,000 layers"),
        ({"num_hidden_layers": 50_000, "hidden_size": 4096, "intermediate_size": 16384}, "too many modules|GiB"),
        ({"hidden_size": 2**22, "num_attention_heads": 2}, "GiB"),
        ({"vocab_size": 2**40, "hidden_size": 4096}, "GiB"),
        ({"hidden_size": 2**40, "num_attention_heads": 2}, "cannot be laid out|GiB"),
    ],
)
@pytest.mark.parametrize("spec", ["init:{}", "{}"])
def test_a_configuration_larger_than_memory_is_refused_with_an_estimate(
    folder: Path, spec: str, change: dict[str, int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(affording, "LONGEST_BUILD", 0.5)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(LoadError, match=why):
        load(spec.format(folder))


def test_a_billion_experts_are_refused_with_an_estimate(tmp_path: Path) -> None:
    load("init:tiny-mixtral").model.config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_local_experts": 10**9}))
    with pytest.raises(LoadError, match="GiB"):
        load(f"init:{path}")
