"""What transformers does to a checkpoint while it loads it: followed where it only renames and stacks, else refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter, WeightRenaming

from rankscope import Inputs, Model
from rankscope.errors import LoadError
from rankscope.ext.offload.meta_model import open_meta_model
from rankscope.models.loading import load
from rankscope.verbs.measure.run import measure
from tests.ext.offload.folders import same_bits, saved

SHAPE = {"sequences": 3, "tokens": 12, "batch": 2}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["qwen2-moe", "mixtral", "deepseek-v3"])
def test_experts_that_are_stored_one_by_one_are_stacked(tmp_path: Path, name: str) -> None:
    folder = saved(f"init:tiny-{name}", tmp_path / "model")
    whole = load(folder).model.state_dict()
    stacked = 0
    for slot in open_meta_model(folder).slots.values():
        place = torch.full(whole[slot.name].shape, torch.nan)
        for stored, part in slot.reads(place):
            stored.read_into(part)
        assert torch.equal(place, whole[slot.name]), slot.name
        stacked += len(slot.parts) > 1
    assert stacked > 0
    assert same_bits(measure(folder, Inputs(**SHAPE)), measure(Model(folder, offload=True), Inputs(**SHAPE)))


def conversions(monkeypatch: pytest.MonkeyPatch, *found: object) -> None:
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: list(found))


def test_what_is_computed_from_stored_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored tensor has the name and, being square, the shape of the parameter, but it is transposed in loading."""
    folder = saved("init:tiny-llama", tmp_path / "model")
    same = "self_attn.q_proj.weight"
    conversions(monkeypatch, WeightConverter(same, same, operations=[Transpose(0, 1)]))
    with pytest.raises(LoadError, match=r"q_proj\.weight.*cannot be offloaded"):
        measure(Model(folder, offload=True), Inputs(**SHAPE))


@pytest.mark.parametrize(
    "operations",
    [
        [MergeModulelist(dim=1)],
        [MergeModulelist(dim=0), Concatenate(dim=0)],
        [MergeModulelist(dim=0), Transpose(1, 2)],
        [MergeModulelist(dim=0), Concatenate(dim=1), Transpose(1, 2)],
    ],
)
def test_other_ways_to_merge_experts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operations: list[object]
) -> None:
    folder = saved("init:tiny-qwen2-moe", tmp_path / "model")
    patterns = ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"][: len(operations)]
    down = WeightConverter("mlp.experts.*.down_proj.weight", "mlp.experts.down_proj", operations=[MergeModulelist(0)])
    conversions(monkeypatch, WeightConverter(patterns, "mlp.experts.gate_up_proj", operations=operations), down)
    with pytest.raises(LoadError, match=r"gate_up_proj.*cannot be offloaded"):
        measure(Model(folder, offload=True), Inputs(**SHAPE))


def test_two_tensors_for_one_parameter_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("init:tiny-llama", tmp_path / "model")
    conversions(monkeypatch, WeightRenaming(r"self_attn\.k_proj", "self_attn.v_proj"))
    with pytest.raises(LoadError, match=r"(k|v)_proj\.weight.*cannot be offloaded"):
        measure(Model(folder, offload=True), Inputs(**SHAPE))
