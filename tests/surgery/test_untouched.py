"""An edit that would touch nothing, or only some of what it was asked to change, raises and names the block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope import Surgery
from rankscope.errors import UnsupportedOperationError
from rankscope.surgery.operating import operate
from tests.own_models import GPT, SelfAttention, ids

DIM = 16
Places = Callable[[int, Tensor], Tensor]


class Block(nn.Module):
    """``norm(place, x)`` is asked at the stream (0, 1) and at what the branches give (2, 3)."""

    def __init__(self, norm: Places) -> None:
        super().__init__()
        self.at = norm
        self.attention = SelfAttention(DIM, 2, causal=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(DIM, elementwise_affine=False) for _ in range(3))
        self.wide_norm = nn.LayerNorm(2 * DIM, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.at(self, 2, self.attention(self.at(self, 0, x)))
        return x + self.at(self, 3, self.mlp(self.at(self, 1, x)))


class Net(nn.Module):
    def __init__(self, norm: Places) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def net(norm: Places) -> Net:
    torch.manual_seed(0)
    return Net(norm).double().eval()


def tokens() -> Tensor:
    return torch.randn(2, 7, DIM, generator=torch.Generator().manual_seed(1)).double()


def without(model: Net, x: Tensor) -> Tensor:
    plain = net(lambda block, place, y: y)
    with torch.no_grad():
        return plain(x)


REPLACED: dict[str, Places] = {
    "modules": lambda block, place, x: block.norm1(x) if place < 2 else x,
    "by keyword": lambda block, place, x: block.norm1(input=x) if place < 2 else x,
    "functions": lambda block, place, x: F.layer_norm(x, (DIM,)) if place < 2 else x,
    "functions by keyword": lambda block, place, x: F.rms_norm(input=x, normalized_shape=(DIM,)) if place < 2 else x,
    "sandwich of modules": lambda block, place, x: block.norm2(x),
    "sandwich of functions": lambda block, place, x: F.rms_norm(x, (DIM,)),
    "only on branches": lambda block, place, x: F.layer_norm(x, (DIM,)) if place > 1 else x,
}


@pytest.mark.parametrize("kind", REPLACED)
def test_norms_in_this_form_are_replaced(kind: str) -> None:
    model, x = net(REPLACED[kind]), tokens()
    with torch.no_grad(), operate(model, Surgery(norm="identity"), inputs=x):
        got = model(x)
    want = without(model, x)
    assert bool((got - want).norm() <= 1e-12 * want.norm())


def wide(block: Block, place: int, x: Tensor) -> Tensor:
    return block.wide_norm(torch.cat([x, x], dim=-1))[..., :DIM] if place == 1 else block.norm1(x)


def turned(block: Block, place: int, x: Tensor) -> Tensor:
    return F.layer_norm(x.transpose(1, 2), (7,)).transpose(1, 2) if place == 1 else block.norm1(x)


def one_written_out(block: Block, place: int, x: Tensor) -> Tensor:
    return block.norm1(x) if place == 0 else x * torch.rsqrt(x.square().mean(-1, keepdim=True)) if place == 1 else x


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (wide, r"block 0 \(blocks.0\) normalises a tensor of shape \(2, 7, 32\)"),
        (turned, r"block 0 \(blocks.0\) normalises a tensor of shape \(2, 16, 7\)"),
        (one_written_out, "Found at block 0: torch.mul in blocks.0; block 1: torch.mul in blocks.1"),
    ],
)
def test_a_norm_that_would_stay_in_place_is_refused(norm: Places, reason: str) -> None:
    model, x = net(norm), tokens()
    with (
        pytest.raises(UnsupportedOperationError, match=reason),
        operate(model, Surgery(norm="identity"), inputs=x),
        torch.no_grad(),
    ):
        model(x)


def test_a_norm_that_is_not_met_again_is_missed() -> None:
    model, x = net(lambda block, place, y: block.norm1(y) if block.training or block.norms else y), tokens()
    for block in model.blocks:
        block.norms = True
    with torch.no_grad(), operate(model, Surgery(norm="rms"), inputs=x):
        model(x)
        model.blocks[1].norms = False
        with pytest.raises(UnsupportedOperationError, match=r"norm='rms' changed nothing in block 1 \(blocks.1\)"):
            model(x)


def test_skips_that_are_not_there_are_not_cut_in_silence() -> None:
    torch.manual_seed(0)
    model = GPT("bare").eval()
    for words in ({"skip": 0.0}, {"attention_skip": 0.0}, {"mlp_skip": 0.0, "layers": [1]}):
        with (
            pytest.raises(UnsupportedOperationError, match="would change nothing: block"),
            operate(model, Surgery(**words), inputs=ids()),
        ):
            pass
