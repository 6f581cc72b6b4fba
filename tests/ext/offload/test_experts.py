"""Experts read one at a time: the values of the block in memory, in less memory, or a refusal."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rankscope import Inputs, Model
from rankscope.errors import UnsupportedConfigError
from rankscope.ext.offload import schedule as schedules
from rankscope.ext.offload import weights
from rankscope.ext.offload.experts import LazyExperts
from rankscope.ext.offload.meta_model import open_meta_model
from rankscope.ext.offload.weights import largest_block
from rankscope.models.loading import load
from rankscope.verbs.measure.run import measure
from tests.ext.offload.folders import same_bits, saved

SHAPE = {"sequences": 3, "tokens": 12, "batch": 2}


@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss"])
def test_the_same_bits_expert_by_expert(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(f"init:tiny-{name}", tmp_path / "model")
    whole = measure(folder, Inputs(**SHAPE))
    monkeypatch.setattr(schedules, "fits", lambda need, memory: False)
    run = measure(Model(folder, offload=True), Inputs(**SHAPE))
    assert run.extra["offload"]["by_expert"] is True
    assert same_bits(run, whole)


@pytest.mark.parametrize("by_expert", [False, True])
def test_a_buffer_that_stays_in_float32_next_to_bfloat16(
    tmp_path: Path, by_expert: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router of DeepSeek-V3 adds a correction in float32; rounded to bfloat16 it would choose other experts."""
    whole = load("init:tiny-deepseek-v3", seed=3, dtype="bfloat16").model
    name = next(name for name, _ in whole.named_buffers() if name.endswith("e_score_correction_bias"))
    parent, _, leaf = name.rpartition(".")
    size = whole.get_buffer(name).shape
    whole.get_submodule(parent)._buffers[leaf] = 1 + torch.rand(size, generator=torch.Generator().manual_seed(1)) / 300
    whole.save_pretrained(tmp_path / "model")
    assert load(tmp_path / "model").model.get_buffer(name).dtype == torch.float32
    assert torch.equal(open_meta_model(tmp_path / "model").loaded.model.get_buffer(name), whole.get_buffer(name))
    monkeypatch.setattr(schedules, "fits", lambda need, memory: not by_expert)
    assert same_bits(
        measure(Model(tmp_path / "model", offload=True), Inputs(**SHAPE)), measure(tmp_path / "model", Inputs(**SHAPE))
    )


def test_experts_that_are_multiplied_all_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("init:tiny-llama4", tmp_path / "model")
    monkeypatch.setattr(schedules, "fits", lambda need, memory: False)
    with pytest.raises(UnsupportedConfigError, match=r"gate_up_proj.*\(bmm\).*cannot be read one at a time"):
        measure(Model(folder, offload=True), Inputs(**SHAPE))


@pytest.fixture
def lazy(tmp_path: Path) -> tuple[LazyExperts, torch.Tensor]:
    folder = saved("init:tiny-qwen2-moe", tmp_path / "model")
    name = "layers.0.mlp.experts.gate_up_proj"
    slot = open_meta_model(folder).slots[name]
    with ThreadPoolExecutor(2) as readers:
        return LazyExperts(slot.parameter.data, slot.experts, readers, name), load(folder).model.state_dict()[name]


def test_each_expert_is_its_matrix(lazy: tuple[LazyExperts, torch.Tensor]) -> None:
    experts, whole = lazy
    assert experts.shape == whole.shape
    assert experts.dtype == whole.dtype
    for number in range(len(whole)):
        assert torch.equal(experts[number], whole[number])
        assert torch.equal(experts.transpose(-2, -1)[torch.tensor(number)], whole[number].T)


@pytest.mark.parametrize("act", [torch.sum, torch.clone, lambda one: one + 1, lambda one: one[:2], lambda one: one.T])
def test_anything_else_is_refused(lazy: tuple[LazyExperts, torch.Tensor], act: object) -> None:
    with pytest.raises(UnsupportedConfigError, match="cannot be read one at a time"):
        act(lazy[0])  # type: ignore[operator]


def test_a_block_by_expert_is_smaller_than_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "EXPERTS_AT_ONCE", 1)
    meta_model = open_meta_model(saved("init:tiny-qwen2-moe", tmp_path / "model"))
    names = ["layers.0"]
    whole, parts = (largest_block(meta_model, names, by_expert=by_expert) for by_expert in (False, True))
    stacks = [slot.nbytes for slot in meta_model.slots.values() if slot.name.startswith("layers.0.") and slot.experts]
    assert len(stacks) == 2
    assert whole - parts == 3 * sum(stacks) // 4, "three of four experts are not in memory"
