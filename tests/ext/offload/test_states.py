"""Streams that are put aside come back with the same bits in the same places."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rankscope.errors import LoadError, ResultError
from rankscope.ext.offload.states import read_state

X = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))


def test_a_file_of_others_is_no_state(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"t0": X}, tmp_path / "s.safetensors", {"state": "[1"})
    with pytest.raises(ResultError, match="not a stored residual stream"):
        read_state(tmp_path / "s.safetensors")
    with pytest.raises(LoadError):
        read_state(tmp_path / "absent.safetensors")
