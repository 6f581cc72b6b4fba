"""What a remedy says a model lacks is what was looked for and not found, never what the model is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope.errors import InputError


class Mixed(nn.Module):
    """A skip that is not an addition: half of the stream, half of the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        return torch.lerp(x, self.attention(z, z, z, need_weights=False)[0], 0.5)


@pytest.mark.parametrize("name", ["deepnorm", "pre_norm"])
def test_item_11_a_skip_that_was_not_recognised_is_not_denied(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Mixed(), Mixed())
    with pytest.raises(InputError) as caught:
        rs.remedy(model, torch.randn(2, 6, 16), remedies=[name], gradients=False)
    assert "was found" in str(caught.value)
    assert "adds nothing" not in str(caught.value)
