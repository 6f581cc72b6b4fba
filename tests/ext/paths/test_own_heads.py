"""A model of the user's own with a description of its heads: decomposed and bounded; without one, told how."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

import rankscope as rs
from rankscope.errors import UnsupportedConfigError
from rankscope.models import Family, register
from rankscope.models.heads.family import FAMILIES

DIM, HEADS, WORDS = 16, 2, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, DIM), nn.ModuleList(Block() for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return x  # type: ignore[no-any-return]


class Described(PretrainedConfig):
    model_type = "described-by-a-test"


class Mine(PreTrainedModel):
    config_class = Described

    def __init__(self) -> None:
        super().__init__(Described(num_attention_heads=HEADS))
        self.inner = Plain()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids)  # type: ignore[no-any-return]


@pytest.fixture
def described() -> Iterator[None]:
    name = Described.model_type
    register(Family(name=name, model_types=(name,), layout="separate", projections=("q", "k", "v"), output="out",
                    norms=("norm1", "norm2"), mlp=("mlp",)))  # fmt: skip
    yield
    del FAMILIES._entries[name]


def ids() -> Tensor:
    return torch.randint(WORDS, (2, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("described")
def test_a_described_model_is_decomposed_and_bounded() -> None:
    torch.manual_seed(0)
    model = Mine().eval()
    assert rs.decompose(model, ids()).extra["sum_error"] < 1e-5
    assert rs.bound(model, ids()).table.num_rows


@pytest.mark.parametrize("verb", [rs.decompose, rs.bound])
def test_one_without_a_description_is_told_how(verb) -> None:
    with pytest.raises(UnsupportedConfigError, match=r"Describe one of your own .* rankscope.models.Family"):
        verb(Plain(), ids())
