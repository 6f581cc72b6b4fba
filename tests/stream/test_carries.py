"""What the dataflow finds that a follower of torch functions cannot see, and the norms nobody declared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rankscope.models.view import Stack
from rankscope.surgery.session import structure_of
from tests.own_models import SelfAttention

DIM = 8


class Block(nn.Module):
    def __init__(self, join: Callable[[Tensor, Tensor], Tensor], norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.join, self.normalise = join, norm
        self.attention = SelfAttention(DIM, 2, causal=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = self.join(x, self.attention(self.normalise(x)))
        return self.join(x, self.mlp(self.normalise(x)))


class Net(nn.Module):
    def __init__(self, join: Callable[[Tensor, Tensor], Tensor], norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(join, norm) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def same(x: Tensor) -> Tensor:
    return x


def plain(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def stack_of(join: Callable[[Tensor, Tensor], Tensor] = plain, norm: Callable[[Tensor], Tensor] = same) -> Stack:
    torch.manual_seed(0)
    return structure_of(Net(join, norm).eval(), torch.randn(2, 5, DIM), "blocks.*").stacks[0]


def test_plain_blocks_have_no_other_way_around() -> None:
    found = stack_of()
    assert found.sums == "plain"
    assert not found.carries
    assert not found.own_norms


def by_hand(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    "norm",
    [
        by_hand,
        lambda x: torch.nn.functional.normalize(x, dim=-1),
        lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
        lambda x: x / x.norm(dim=-1, keepdim=True),
    ],
)
def test_a_norm_written_out_is_found(norm: Callable[[Tensor], Tensor]) -> None:
    found = stack_of(norm=norm)
    assert {(carry.first, carry.last, carry.module) for carry in found.own_norms} == {
        (0, 0, "blocks.0"),
        (1, 1, "blocks.1"),
    }
    assert not found.carries


class HouseNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return by_hand(x)


def test_a_norm_module_is_not_one_written_out() -> None:
    assert not stack_of(norm=HouseNorm()).own_norms
    assert not stack_of(norm=lambda x: torch.nn.functional.layer_norm(x, (DIM,))).own_norms
    assert not stack_of(norm=lambda x: x * x.amax(dim=(1, 2), keepdim=True)).own_norms


def test_autocast_does_not_hide_a_skip() -> None:
    torch.manual_seed(0)
    model = Net(plain, same).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = structure_of(model, torch.randn(2, 5, DIM), "blocks.*").stacks[0]
    assert not found.carries
    assert found.plans[0].skips == ("attention", "mlp")
