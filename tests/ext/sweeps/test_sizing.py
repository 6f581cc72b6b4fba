"""Memory is estimated from headers and shapes, and the estimate holds for what was run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rankscope.ext.sweeps.sizing import PROCESS, TaskSize, memory_for, size_of_folder, size_on_meta
from rankscope.models.loading import load

FACTS = {"verb": "measure", "dtype": None, "inputs": {"batch": 4, "sequences": 4, "tokens": 64}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_files_of_a_model_tell_its_size(tmp_path: Path, dtype: torch.dtype) -> None:
    model = load("init:tiny-llama").model.to(dtype)
    model.save_pretrained(tmp_path)
    found = size_of_folder(tmp_path)
    assert found is not None
    headers = sum(int.from_bytes(path.read_bytes()[:8], "little") + 8 for path in tmp_path.glob("*.safetensors"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert found.weight_bytes == parameters * dtype.itemsize + headers
    assert parameters <= found.parameters <= parameters + headers
    assert (found.width, found.heads, found.inner) == (32, 4, 64)
    (tmp_path / "config.json").write_text("no JSON")
    assert size_of_folder(tmp_path) is None


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-t5", "tiny-vit"])
def test_the_meta_device_counts_what_loading_counts(name: str) -> None:
    assert size_on_meta(f"init:{name}", None).parameters == load(f"init:{name}").parameters


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


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "verb", "tokens"), [("init:gpt2", "measure", 256), ("init:bert-base", "exact", 64)])
def test_the_estimate_is_above_what_a_task_takes_and_not_far_above(spec: str, verb: str, tokens: int) -> None:
    code = (
        "from rankscope.ext.sweeps.plan import plan_of\nfrom rankscope.ext.sweeps.tasks import tasks_of\n"
        "from rankscope.ext.sweeps.working import do\n"
        "from rankscope.ext.sweeps.sizing import memory_for, size_on_meta\n"
        f"inputs = {{'sequences': 4, 'tokens': {tokens}}}\n"
        f"plan = plan_of({{'models': ['{spec}'], 'verbs': ['{verb}'], 'inputs': inputs}})\n"
        "task = next(tasks_of(plan))\n"
        f"asked = memory_for(size_on_meta('{spec}', None), task.facts)\n"
        "_, record = do(task, {})\nprint(asked, record['peak_bytes'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    asked, peak = map(int, done.stdout.split())
    assert peak <= asked <= 4 * peak
