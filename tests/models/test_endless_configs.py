"""Configurations that fill memory when they are read, and models in the hub's cache: every door has the same checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.errors import LoadError
from rankscope.models.loading import load
from rankscope.models.loading.config import refuse_remote_kernels

QWEN = {"model_type": "qwen2", "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "config",
    [
        {**QWEN, "num_hidden_layers": 10**9},
        {**QWEN, "num_labels": 10**9},
        {"model_type": "bert", "num_labels": 1e12},
        {"model_type": "llava", "text_config": {**QWEN, "num_hidden_layers": 10**9}},
    ],
    ids=lambda config: ",".join(config),
)
@pytest.mark.parametrize("spec", ["init:{}", "{}"])
def test_endless_lists_are_refused_before_they_are_made(spec: str, config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=r"000 (layers|num_labels); more than 100,000|[.]0 (layers|num_labels)"):
        load(spec.format(tmp_path))


def test_a_configuration_does_not_choose_another_file_of_weights(tmp_path: Path) -> None:
    load("init:tiny-bert").model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    (tmp_path / "other.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "transformers_weights": "other.safetensors.index.json"})
    )
    with pytest.raises(LoadError, match="names its own file of weights"):
        load(tmp_path)


def test_labels_by_number_are_no_kernels() -> None:
    refuse_remote_kernels({"id2label": {0: "a/b"}, "attn_implementation": "sdpa"}, "a model")
    with pytest.raises(LoadError, match="attention code from elsewhere"):
        refuse_remote_kernels({"text_config": {"attn_implementation": "owner/kernel"}}, "a model")


PROGRAM = """
import json, pathlib, sys
from rankscope import load
from rankscope.errors import LoadError
snapshot = pathlib.Path(sys.argv[1])
whole = load("owner/name").loaded
print(whole.origin, whole.tokenizer is not None, whole.notes)
(snapshot / "special_tokens_map.json").write_text(json.dumps({"vocab_file": "/dev/zero"}))
try:
    load("owner/name").loaded
except LoadError as error:
    print(error)
"""


@pytest.mark.slow
def test_tokenizers_from_the_hub_pass_the_same_check(tmp_path: Path) -> None:
    from tests.fuzz.loading_targets import tokenizer_seeds

    home = tmp_path / "hub" / "models--owner--name"
    snapshot = home / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    load("init:tiny-bert").model.save_pretrained(snapshot)
    (snapshot / "tokenizer.json").write_bytes(tokenizer_seeds()[0])
    surroundings = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(snapshot)], env=surroundings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().splitlines()
    assert first == "hub True ()"
    assert "'vocab_file', which is not a special token" in second
