"""What is asked of a model before it is spread over processes."""

from __future__ import annotations

import pytest
import torch

from rankscope.errors import LoadError
from rankscope.models.loading import load, spreading


@pytest.mark.parametrize("spread", ["fsdp", "tensor"])
def test_an_old_torch_is_refused(spread: spreading.Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("init:tiny-llama").model
    monkeypatch.setattr(spreading, "in_group", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(spreading, "OLDEST_TORCH", "99.1")
    with pytest.raises(LoadError, match=f"parallel='{spread}' needs torch 99.1 or newer.* use parallel='data'"):
        spreading.spread_arguments(spread, model.config, type(model))


def test_one_process_is_too_few() -> None:
    with pytest.raises(LoadError, match="there is one"):
        spreading.spread_arguments("fsdp", None, None)
