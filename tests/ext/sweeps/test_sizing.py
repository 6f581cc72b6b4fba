"""Memory is estimated from headers and shapes, and the estimate holds for what was run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rankscope.errors import RankscopeError
from rankscope.ext.sweeps.sizing import PROCESS, TaskSize, memory_for, size_from_headers, size_on_meta, sized
from rankscope.models.loading import load

FACTS = {"verb": "measure", "dtype": None, "inputs": {"batch": 4, "sequences": 4, "tokens": 64}}


def starting(length: int, rest: bytes) -> bytes:
    return length.to_bytes(8, "little") + rest


def test_headers_give_what_loading_gives(tmp_path: Path) -> None:
    model = load("init:tiny-llama").model
    model.save_pretrained(tmp_path)
    found = size_from_headers(tmp_path)
    assert found is not None
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.weight_bytes == 4 * found.parameters
    assert (found.width, found.heads, found.inner) == (32, 4, 64)


def test_shards_and_dtypes_are_added_up(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}, tmp_path / "m-1.safetensors")
    save_file({"c": torch.zeros(2, 2, dtype=torch.float64)}, tmp_path / "m-2.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({"n_embd": 48, "n_head": 3}))
    assert size_from_headers(tmp_path) == TaskSize(26, 60 + 14 + 32, 48, 3, 192)


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-t5", "tiny-vit"])
def test_the_meta_device_counts_what_loading_counts(name: str) -> None:
    assert size_on_meta(f"init:{name}", None).parameters == load(f"init:{name}").parameters


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, starting(10, b"not json!!"), starting(2, b"[]")])
def test_a_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(RankscopeError, match="header"):
        size_from_headers(tmp_path)


def test_it_grows_with_everything_it_should() -> None:
    size = TaskSize(10**9, 2 * 10**9, 2048, 16, 8192)
    base = memory_for(size, FACTS)
    assert base > PROCESS + 2 * 10**9
    inputs = FACTS["inputs"]
    for more in ({"tokens": 4096}, {"batch": 64, "sequences": 64}):
        assert memory_for(size, {**FACTS, "inputs": {**inputs, **more}}) > base
    assert memory_for(size, {**FACTS, "inputs": {**inputs, "batch": 64}}) == base, "no more than there are sequences"
    assert memory_for(size, {**FACTS, "dtype": "float32"}) - base == pytest.approx(1.5 * 2 * 10**9, rel=1e-6)
    assert memory_for(size, {**FACTS, "verb": "exact"}) > base + 8 * 10**9
    assert memory_for(None, FACTS) == memory_for(size, {**FACTS, "verb": "predict"}) == PROCESS


def test_odd_configurations_are_no_error() -> None:
    assert sized({"hidden_size": [1, 2], "text_config": {"hidden_size": 64}}, 1000, 4000).width == 64
    assert sized({}, 0, 0).width >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "verb", "tokens"), [("init:gpt2", "measure", 256), ("init:bert-base", "exact", 64)])
def test_the_estimate_is_above_what_a_task_takes_and_not_far_above(spec: str, verb: str, tokens: int) -> None:
    code = (
        "from rankscope.ext.sweeps.plan import plan_of\nfrom rankscope.ext.sweeps.tasks import tasks_of\n"
        "from rankscope.ext.sweeps.working import outcome_of\n"
        "from rankscope.ext.sweeps.sizing import memory_for, size_on_meta\n"
        f"inputs = {{'sequences': 4, 'tokens': {tokens}}}\n"
        f"plan = plan_of({{'models': ['{spec}'], 'verbs': ['{verb}'], 'inputs': inputs}})\n"
        "task = next(tasks_of(plan))\n"
        f"asked = memory_for(size_on_meta('{spec}', None), task.facts)\n"
        "outcome = outcome_of(task, {})\nassert outcome.table is not None, outcome.facts\n"
        "print(asked, outcome.facts['peak_bytes'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    asked, peak = map(int, done.stdout.split())
    assert peak <= asked <= 4 * peak
