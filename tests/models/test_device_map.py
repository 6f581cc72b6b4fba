"""Models that accelerate has spread over devices and disk are measured where their layers run."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModel

from rankscope import Inputs
from rankscope.errors import UnsupportedConfigError
from rankscope.ext.theory.bound.run import bound
from rankscope.verbs.ablate.run import ablate
from rankscope.verbs.exact.run import exact
from rankscope.verbs.measure.run import measure
from tests.ext.offload.folders import same_bits, saved

PLACES = {
    "llama": {"embed_tokens": "disk", "layers.0": "cpu", "layers.1": "disk", "layers.2": "disk", "norm": "disk"},
    "bert": {"embeddings": "cpu", "encoder.layer.0": "disk", "encoder.layer.1": "cpu", "encoder.layer.2": "disk"},
}
FURTHER = {"llama": {"rotary_emb": "cpu"}, "bert": {"pooler": "disk"}}
SHAPE = {"sequences": 3, "tokens": 16, "batch": 2}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", sorted(PLACES))
def test_offloaded_layers_give_the_same_bits(tmp_path: Path, family: str) -> None:
    folder = saved(f"init:tiny-{family}", tmp_path / family)
    places = {**PLACES[family], **FURTHER[family]}
    placed = AutoModel.from_pretrained(folder, device_map=places, offload_folder=tmp_path / "disk").eval()
    assert any(value.is_meta for value in placed.parameters())
    assert same_bits(measure(folder, Inputs(**SHAPE)), measure(placed, Inputs(**SHAPE)))
    assert same_bits(ablate(folder, Inputs(**SHAPE)), ablate(placed, Inputs(**SHAPE)))
    for verb in (exact, bound):
        with pytest.raises(UnsupportedConfigError, match="offload=True"):
            verb(placed, Inputs(sequences=1, tokens=8))
