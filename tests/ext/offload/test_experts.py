"""A mixture of experts, read block by block."""

from __future__ import annotations

from pathlib import Path

import torch

from rankscope import Inputs, Model
from rankscope.ext.offload.meta_model import open_meta_model
from rankscope.models.loading import load
from rankscope.verbs.measure.run import measure
from tests.ext.offload.folders import same_bits

SHAPE = {"sequences": 3, "tokens": 12, "batch": 2}


def test_a_buffer_that_stays_in_float32_next_to_bfloat16(tmp_path: Path) -> None:
    """The router of DeepSeek-V3 adds a correction in float32; rounded to bfloat16 it would choose other experts."""
    whole = load("init:tiny-deepseek-v3", seed=3, dtype="bfloat16").model
    name = next(name for name, _ in whole.named_buffers() if name.endswith("e_score_correction_bias"))
    parent, _, leaf = name.rpartition(".")
    size = whole.get_buffer(name).shape
    whole.get_submodule(parent)._buffers[leaf] = 1 + torch.rand(size, generator=torch.Generator().manual_seed(1)) / 300
    whole.save_pretrained(tmp_path / "model")
    assert load(tmp_path / "model").model.get_buffer(name).dtype == torch.float32
    assert torch.equal(open_meta_model(tmp_path / "model").loaded.model.get_buffer(name), whole.get_buffer(name))
    assert same_bits(
        measure(Model(tmp_path / "model", offload=True), Inputs(**SHAPE)), measure(tmp_path / "model", Inputs(**SHAPE))
    )
