"""Finding blocks in models of every make."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import T5Config, T5ForConditionalGeneration

import rankscope as rs
from rankscope.errors import DiscoveryError
from rankscope.models.view import ModelView
from rankscope.stream.discovery import discover
from rankscope.surgery.session import structure_of
from tests.own_models import GPT, Block, InlineGPT, ids


def found(model: nn.Module, *inputs: torch.Tensor, batch: int = 2, **options: object) -> ModelView:
    model.eval()
    return discover(model, lambda: model(*inputs), batch=batch, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "skips"),
    [
        ("pre", ("attention", "mlp")),
        ("post", ("attention", "mlp")),
        ("parallel", ("both",)),
        ("inplace", ("attention", "mlp")),
        ("bare", ()),
    ],
)
def test_a_hand_written_gpt(kind: str, skips: tuple[str, ...]) -> None:
    (stack,) = found(GPT(kind), ids()).stacks
    assert (stack.name, stack.depth, stack.layout) == (None, 3, "batch tokens dim")
    assert [call.module_name for call in stack.calls] == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(plan.skips == skips and plan.attention == ("attention",) for plan in stack.plans)
    assert stack.final_norm == "norm"


class Rounded(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + ((weight * 64).round() / 64 - weight)


class LowRank(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(dim, 2, bias=False), nn.Linear(2, dim, bias=False)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up(self.down(weight)) + (weight @ weight.T).softmax(-1) @ weight


def test_what_a_parametrization_adds_up_is_no_stream() -> None:
    """Quantisation-aware training and adapters add to weights, as blocks do to a stream, and are numbered."""
    model = GPT().eval()
    twin = copy.deepcopy(model)
    for block in model.blocks:
        parametrize.register_parametrization(block.attention.out, "weight", Rounded())
        parametrize.register_parametrization(block.attention.out, "weight", LowRank(32))
    (stack,) = found(model, ids()).stacks
    assert [call.module_name for call in stack.calls] == ["blocks.0", "blocks.1", "blocks.2"]
    for block, plain in zip(model.blocks, twin.blocks, strict=True):
        plain.attention.out.weight.data = block.attention.out.weight.detach()
    metrics = ["relative_residual", "effective_rank", "attention_entropy"]
    for surgery in (None, rs.Surgery(skip=0.0)):
        tables = [rs.measure(one, ids(), surgery, metrics=metrics).table for one in (model, twin)]
        assert tables[0]["value"].to_pylist() == tables[1]["value"].to_pylist()


def test_a_shared_block_is_counted_by_call() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(32, 4, "pre", True)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                x = self.layers[0](x)
            return x

    (stack,) = found(Recurrent(), torch.randn(2, 7, 32)).stacks
    assert stack.depth == 5
    assert {call.module_name for call in stack.calls} == {"layers.0"}


def test_one_block_without_a_container_is_found() -> None:
    (stack,) = found(Block(32, 4, "pre", True), torch.randn(2, 7, 32)).stacks
    assert (stack.depth, stack.calls[0].module_name) == (1, "")


def test_blocks_without_modules() -> None:
    (stack,) = found(InlineGPT(), torch.randn(2, 7, 32)).stacks
    assert stack.depth == 3
    assert len(stack.calls) == 1
    assert stack.calls[0].final_norm_inside


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_transformer_encoder(norm_first: bool, batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=norm_first, batch_first=batch_first)
    x = torch.randn(2, 7, 32) if batch_first else torch.randn(7, 2, 32)
    (stack,) = found(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), x).stacks
    assert stack.depth == 3
    assert stack.layout == ("batch tokens dim" if batch_first else "tokens batch dim")
    assert all(plan.skips == ("attention", "mlp") for plan in stack.plans)


def test_cross_attention_is_told_from_self_attention_by_its_keys() -> None:
    layer = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 2)
    (stack,) = found(decoder, torch.randn(2, 7, 32), torch.randn(2, 5, 32)).stacks
    assert all(plan.skips == ("attention", "cross_attention", "mlp") for plan in stack.plans)
    assert all(plan.attention == ("attention", "cross_attention") for plan in stack.plans)


class CumulativeMean(nn.Module):
    """A mean of each token and those before it, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(16, 16)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.value(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class Attention(nn.Module):
    """Two heads of attention, which are on the first axis, together with the sequences, as in BART."""

    def __init__(self, *, crosses: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.crosses = crosses

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        read = memory if self.crosses else x
        query, key, value = (
            part(given).unflatten(-1, (2, 8)).transpose(1, 2).flatten(0, 1)
            for part, given in ((self.query, x), (self.key, read), (self.value, read))
        )
        mixed = (query @ key.mT / 3).softmax(-1) @ value
        return mixed.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)


class NamedBlock(nn.Module):
    """A block whose first branch is an attribute of any name."""

    def __init__(self, name: str, branch: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, branch)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + getattr(self, self.name)(self.norm1(x), memory)
        return x + self.feed(self.norm2(x))


class NamedBlocks(nn.Module):
    def __init__(self, name: str, branch: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NamedBlock(name, branch()) for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, memory)
        return x


@pytest.mark.parametrize("name", ["mix", "attn", "cross_attn", "mamba", "mlp"])
@pytest.mark.parametrize(
    ("branch", "label"),
    [
        (CumulativeMean, "mixer"),
        (partial(Attention, crosses=False), "attention"),
        (partial(Attention, crosses=True), "cross_attention"),
    ],
    ids=["mean", "attention", "cross-attention"],
)
def test_a_name_decides_nothing(branch: Callable[[], nn.Module], label: str, name: str) -> None:
    torch.manual_seed(0)
    (stack,) = found(NamedBlocks(name, branch), torch.randn(2, 7, 16), torch.randn(2, 7, 16)).stacks
    assert [plan.skips for plan in stack.plans] == [(label, "mlp")] * 2
    assert [plan.attention for plan in stack.plans] == [() if label == "mixer" else (label,)] * 2


def test_blocks_named_by_the_user() -> None:
    (stack,) = found(GPT("pre"), ids(), blocks="blocks.*").stacks
    assert stack.depth == 3
    (stack,) = found(GPT("pre"), ids(), blocks=["blocks.0", "blocks.2"]).stacks
    assert [call.module_name for call in stack.calls] == ["blocks.0", "blocks.2"]


def test_nothing_like_a_block_is_an_error_that_helps() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(DiscoveryError, match="No residual blocks were found in Sequential") as error:
        found(model, torch.randn(2, 3, 4))
    assert "blocks=" in error.value.otherwise
    with pytest.raises(DiscoveryError, match=r"matches blocks='layer\.\*'"):
        found(GPT("pre"), ids(), blocks="layer.*")


def test_a_guard_against_overflow_hides_no_block() -> None:
    """T5 clamps its stream in float16 only: it had 4 + 6 blocks there, and 2 + 2 in float32."""
    config = T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    inputs = {"input_ids": ids(2, 12), "decoder_input_ids": ids(2, 12)}
    whole = structure_of(model, inputs).stacks
    assert [stack.depth for stack in whole] == [2, 2]
    half = structure_of(model.to(torch.float16), inputs).stacks
    assert [(stack.name, stack.plans) for stack in half] == [(stack.name, stack.plans) for stack in whole]
