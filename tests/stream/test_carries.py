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


@torch.jit.script
def scripted_sum(x: Tensor, y: Tensor) -> Tensor:
    return x + y


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


def through_memory(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out.copy_(y)
    rows = out.view(-1, DIM)
    rows += x.reshape(-1, DIM)
    return out


@torch.library.custom_op("rankscope_tests::fused_sum", mutates_args=())
def fused_sum(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def in_numpy(x: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() + y.numpy())


UNSEEN = {
    "custom operator": fused_sum,
    "computed in NumPy": in_numpy,
    "data": lambda x, y: x.data + y,
    "through NumPy": lambda x, y: torch.from_numpy(x.numpy()) + y,
    "scripted": scripted_sum,
    "through shared memory": through_memory,
    "activated": lambda x, y: torch.tanh(x) + y,
    "turned": lambda x, y: (x.transpose(1, 2) + y.transpose(1, 2)).transpose(1, 2),
    "a part": lambda x, y: torch.cat([x[..., :4] + y[..., :4], y[..., 4:]], dim=-1),
    "the larger": torch.maximum,
    "twice": lambda x, y: x + y + x,
}


@pytest.mark.parametrize("form", UNSEEN)
def test_a_skip_that_no_function_shows_is_found(form: str) -> None:
    found = stack_of(UNSEEN[form])
    assert {(carry.first, carry.module) for carry in found.carries} >= {(0, "blocks.0")}


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
