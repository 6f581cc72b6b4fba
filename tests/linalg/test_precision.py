from __future__ import annotations

import pytest
import torch

from rankscope.linalg.precision import float64_home, float_floor, power_of_two_below


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rounded_equal_rows_are_under_the_floor(dtype: torch.dtype) -> None:
    """Rows that are equal up to one rounding in the format have a relative residual below its floor, not far below."""
    row = torch.randn(512, dtype=torch.float64)
    rows = (row * (1 + 0.5 * torch.finfo(dtype).eps * torch.randn(64, 512).sign())).to(dtype).double()
    residual = ((rows - rows.mean(0)).norm() / rows.norm()).item()
    assert float_floor(dtype) / 40 < residual < float_floor(dtype)


def test_scale_is_a_power_of_two_that_rounds_nothing() -> None:
    values = torch.tensor([1.7e308, 1.0, 3.0, 1e-200, 5e-324, 0.0, torch.inf, torch.nan], dtype=torch.float64)
    scale = power_of_two_below(values)
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert torch.isfinite(1 / scale).all()
    assert scale[1:3].tolist() == [1.0, 2.0]
    assert scale[5:].tolist() == [1.0, 1.0, 1.0]


def test_statistics_stay_on_a_device_with_float64() -> None:
    assert float64_home(torch.ones(1)) == torch.device("cpu")
    assert float64_home(torch.ones(1, device="meta")) == torch.device("meta")
