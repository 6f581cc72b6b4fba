"""Presets: every tiny twin builds fast and runs; every real shape has the published number of parameters."""

from __future__ import annotations

import time
from types import MappingProxyType

import pytest
import torch

from rankscope.errors import UnknownNameError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.models.loading.config import model_class_named
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.presets import PRESETS, preset
from tests.tiny_presets import TINY_PRESETS

# Parameters of the backbone without its language-model head, from the papers and released checkpoints.
PUBLISHED = {"bert-base": 109_482_240, "gpt2": 124_439_808}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TINY_PRESETS)
def test_tiny_twin_builds_quickly_and_runs_on_two_random_sequences(name: str) -> None:
    load(f"init:{name}")
    started = time.process_time()
    loaded = load(f"init:{name}")
    assert time.process_time() - started < 1.0
    assert loaded.parameters < 200_000
    only_text = loaded.input_kind in ("text", "text-to-text")
    prepared = prepare_inputs(loaded, sequences=2, tokens=12, random_tokens=only_text)
    with torch.no_grad(), quiet_transformers():
        output = prepared[0].run(loaded.model)[0]
    assert output.shape[0] == 2
    assert torch.isfinite(output).all()


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_real_shape_has_the_published_number_of_parameters(name: str) -> None:
    import transformers

    entry = preset(name)
    config = transformers.AutoConfig.for_model(entry.model_type, **entry.config)
    chosen = model_class_named(entry.model_class)
    with torch.device("meta"), quiet_transformers():
        model = chosen.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_there_are_at_least_seventy_tiny_families() -> None:
    assert len({PRESETS[name].model_type for name in TINY_PRESETS}) >= 70


def test_a_preset_is_data_that_cannot_be_changed() -> None:
    entry = preset("tiny-bert")
    assert isinstance(entry.config, MappingProxyType)
    with pytest.raises(TypeError):
        entry.config["hidden_size"] = 1  # type: ignore[index]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="bert-base") as caught:
        preset("bert-bas")
    assert caught.value.near[0] == "bert-base"
