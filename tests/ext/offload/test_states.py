"""Streams that are put aside come back with the same bits in the same places."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rankscope.errors import LoadError, ResultError
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.ext.offload.states import read_state, write_state

X = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "tensor",
    [
        X,
        X.bfloat16(),
        X.double(),
        X.transpose(0, 1),
        X[:, 1:4, ::2],
        X[0, 0].expand(3, 7),
        torch.empty(2, 0, 7),
        X > 0,
        torch.tensor(3),
    ],
)
def test_values_and_strides(tmp_path: Path, tensor: torch.Tensor) -> None:
    write_state(tmp_path / "s.safetensors", tensor)
    back = read_state(tmp_path / "s.safetensors")
    assert back.dtype == tensor.dtype
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


def test_deviations_keep_scales_no_float_holds(tmp_path: Path) -> None:
    x = Deviation.from_tokens(X[:1].double()).shrunk(-1e5 / 3)
    write_state(tmp_path / "s.safetensors", x)
    back = read_state(tmp_path / "s.safetensors")
    assert isinstance(back, Deviation)
    assert back.log_residual() == x.log_residual() < -30000
    assert torch.equal(back.base, x.base)
    assert [term.log_scale for term in back.terms] == [term.log_scale for term in x.terms]
    assert math.isfinite(back.log_residual())


def test_a_file_of_others_is_no_state(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"t0": X}, tmp_path / "s.safetensors", {"state": "[1"})
    with pytest.raises(ResultError, match="not a stored residual stream"):
        read_state(tmp_path / "s.safetensors")
    with pytest.raises(LoadError):
        read_state(tmp_path / "absent.safetensors")
