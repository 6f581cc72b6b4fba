"""Presets: every tiny twin builds fast and runs; every real shape has the published number of parameters."""

from __future__ import annotations

import pytest
import torch

from rankscope.errors import UnknownNameError
from rankscope.models.loading.config import model_class_named
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.presets import preset

# Parameters of the backbone without its language-model head, from the papers and released checkpoints.
PUBLISHED = {"bert-base": 109_482_240, "gpt2": 124_439_808}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_real_shape_has_the_published_number_of_parameters(name: str) -> None:
    import transformers

    entry = preset(name)
    config = transformers.AutoConfig.for_model(entry.model_type, **entry.config)
    chosen = model_class_named(entry.model_class)
    with torch.device("meta"), quiet_transformers():
        model = chosen.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="bert-base") as caught:
        preset("bert-bas")
    assert caught.value.near[0] == "bert-base"
