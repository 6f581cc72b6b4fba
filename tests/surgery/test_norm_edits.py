"""What stands in for a norm, on tokens at the edge of what floats hold."""

from __future__ import annotations

import pytest
import torch

from rankscope.surgery.surgeon import normed

LENGTH = {"rms": 5**0.5, "scale": 1.0}


@pytest.mark.parametrize("choice", ["rms", "scale"])
@pytest.mark.parametrize("size", [1e-40, 1e-25, 1.0, 1e30])
def test_every_token_gets_its_length_whatever_its_size(choice: str, size: float) -> None:
    x = torch.tensor([[3.0, -4.0, 0.0, 0.0, 0.0]]) * size
    found = normed(x, x, choice)
    torch.testing.assert_close(found, torch.tensor([[0.6, -0.8, 0.0, 0.0, 0.0]]) * LENGTH[choice], rtol=1e-4, atol=0)


@pytest.mark.parametrize("choice", ["keep", "identity", "rms", "scale"])
def test_a_token_of_zeros_stays_one(choice: str) -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    found = normed(x, x, choice)
    assert torch.equal(found[0], x[0])
    assert found.isfinite().all()
