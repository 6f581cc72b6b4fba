"""Surgery that would be wrong in silence: gradients after its ``with`` block, and norms that it leaves standing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from rankscope import Inputs, Surgery, measure
from rankscope.errors import LayoutError, UnsupportedOperationError
from rankscope.models.loading import load
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.surgery.operating import operate
from tests.own_models import Block, checkpointed, ids

ENDED = "not active any more"
REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])


@dataclass
class Result:
    """An output that is neither a tensor nor a dictionary."""

    hidden: Tensor


class Stack(nn.Module):
    """Blocks of which ``again`` says which part runs again in the backward pass: none, each block, or its attention."""

    def __init__(self, again: str, reentrant: bool, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, 4, "pre", True) for _ in range(depth))
        self.again, self.reentrant = again, reentrant
        for block in self.blocks if again == "attention" else ():
            block.attention.forward = partial(self.repeated, block.attention.forward)

    def repeated(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return run(x)
        out: Tensor = checkpoint(run, x, use_reentrant=self.reentrant)
        return out

    def forward(self, x: Tensor) -> Result:
        for block in self.blocks:
            x = self.repeated(block, x) if self.again == "block" else block(x)
        return Result(x)


def stack(again: str, reentrant: bool, depth: int = 3) -> tuple[Stack, Tensor]:
    torch.manual_seed(0)
    model = Stack(again, reentrant, depth).double()
    return model, torch.randn(2, 7, 32, dtype=torch.float64)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@REENTRANT
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("again", ["block", "attention"])
def test_backward_after_the_with_block_raises(again: str, depth: int, reentrant: bool) -> None:
    model, x = stack(again, reentrant, depth)
    with operate(model, Surgery(skip=0.5), inputs=x):
        loss = model(x.clone().requires_grad_()).hidden.square().sum()
    with pytest.raises(UnsupportedOperationError, match=ENDED):
        loss.backward()


@REENTRANT
def test_inside_a_larger_checkpoint(reentrant: bool) -> None:
    model, x = stack("none", reentrant)
    with operate(model, Surgery(skip=0.5), inputs=x):
        loss = checkpoint(lambda y: model(y).hidden, x.requires_grad_(), use_reentrant=reentrant).square().sum()
    with pytest.raises(UnsupportedOperationError, match=ENDED):
        loss.backward()


@REENTRANT
def test_other_surgery_in_the_backward_pass_raises(reentrant: bool) -> None:
    model, x = stack("block", reentrant)
    given = x.clone().requires_grad_()
    with operate(model, Surgery(skip=0.5), inputs=x):
        with operate(model, Surgery(norm="identity")):
            loss = model(given).hidden.sum()
        with pytest.raises(UnsupportedOperationError, match=ENDED):
            loss.backward()
    plain = model(given).hidden.sum()
    with operate(model, Surgery(skip=0.5)), pytest.raises(UnsupportedOperationError, match="ran without the surgery"):
        plain.backward()


@REENTRANT
@pytest.mark.parametrize("again", ["none", "block"])
def test_what_was_right_stays_right(again: str, reentrant: bool) -> None:
    """A backward pass inside, without checkpoints also outside, and a pass without surgery on the same tensors."""
    model, x = stack(again, reentrant)
    given = (2 * x.clone().requires_grad_()).requires_grad_()
    with operate(model, Surgery(skip=0.5), inputs=x):
        loss = model(given).hidden.square().sum()
        if again == "block":
            loss.backward(retain_graph=True)
    if again == "none":
        loss.backward(retain_graph=True)
    found = gradients(model)
    model.zero_grad()
    model.again = "none"
    with operate(model, Surgery(skip=0.5)):
        model(given).hidden.square().sum().backward(retain_graph=True)
    for one, other in zip(found, gradients(model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    model.again = again
    model(given).hidden.sum().backward()


def test_transformers_with_checkpoints_raise_too() -> None:
    with quiet_transformers():
        model = load("init:tiny-llama").model.train()
    for reentrant in (False, True):
        checkpointed(model, use_reentrant=reentrant)
        with operate(model, Surgery(skip=0.5)):
            embedded = model.get_input_embeddings()(ids())
            loss = model(inputs_embeds=embedded, use_cache=False).last_hidden_state.sum()
        with pytest.raises(UnsupportedOperationError, match=ENDED):
            loss.backward()


def test_without_skips_under_autocast_the_stream_keeps_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch is bfloat16 there, and the sum of a block float32: so is the sum of zero times the stream."""
    torch.manual_seed(0)
    model, x = Stack("none", reentrant=False), torch.randn(2, 7, 32)

    def cut(block: Block, x: Tensor) -> Tensor:
        x = 0.0 * x + block.attention(block.norm1(x))
        return 0.0 * x + block.mlp(block.norm2(x))

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with operate(model, Surgery(skip=0.0), inputs=x):
            found = model(x).hidden
        monkeypatch.setattr(Block, "forward", cut)
        wanted = model(x).hidden
    assert found.dtype == wanted.dtype == torch.float32
    assert torch.equal(found, wanted)


class LiveBatchNorm(nn.BatchNorm1d):
    """Statistics of the batch that it is given, also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(32, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Windows(nn.Module):
    """A block whose attention is within windows, which are an axis of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(32, 4, "pre", causal=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.block.attention(self.block.norm1(x).flatten(0, 1)).unflatten(0, (2, 3))
        return x + self.block.mlp(self.block.norm2(x))

    def by_hand(self, x: Tensor) -> Tensor:
        x = 0.5 * x + self.block.attention(self.block.norm1(x).flatten(0, 1)).unflatten(0, (2, 3))
        return 0.5 * x + self.block.mlp(self.block.norm2(x))


def test_windows_that_are_an_axis_of_the_stream() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Windows(), Windows()).double().eval(), torch.randn(2, 3, 4, 32, dtype=torch.float64)
    with torch.no_grad(), operate(model, Surgery(skip=0.5), inputs=x):
        found = model(x)
    with torch.no_grad():
        torch.testing.assert_close(found, model[1].by_hand(model[0].by_hand(x)))


def test_statistics_of_the_batch() -> None:
    model, x = stack("none", reentrant=False)
    for block in model.blocks:
        block.norm1, block.norm2 = LiveBatchNorm().double(), LiveBatchNorm().double()
    model.eval()
    with torch.no_grad(), operate(model, Surgery(skip=0.5), inputs=Inputs(x, axes="batch tokens")):
        found = model(x).hidden
    wanted = x
    with torch.no_grad():
        for block in model.blocks:
            wanted = 0.5 * wanted + block.attention(block.norm1(wanted))
            wanted = 0.5 * wanted + block.mlp(block.norm2(wanted))
    torch.testing.assert_close(found, wanted)


def test_a_stream_in_a_tensor_subclass_is_refused_in_words() -> None:
    model, x = stack("none", reentrant=False)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(TwoTensor(part.weight.data, part.weight.data.clone()), requires_grad=False)
    with torch.no_grad():
        for verb in (measure, lambda *given: operate(given[0], Surgery(skip=0.5), inputs=given[1]).__enter__()):
            with pytest.raises(LayoutError, match="TwoTensor"):
                verb(model, x)


OWN_NORM = re.compile(r"layers\.\d+\.\w*(layernorm|layer_norm)")
"""Norms that are a module of the block itself; what is inside attention, such as q_norm, stays."""


@contextmanager
def without_norms(model: nn.Module) -> Iterator[list[str]]:
    """The twin that is cut by hand: every norm of a block returns what it is given."""
    names = [name for name, _ in model.named_modules() if OWN_NORM.fullmatch(name)]
    handles = [
        model.get_submodule(name).register_forward_hook(lambda module, args, out: args[0].clone()) for name in names
    ]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo2", "olmo3", "exaone4", "flex-olmo", "glm4", "llama"])
def test_norms_are_cut_whatever_they_are_called(family: str) -> None:
    with quiet_transformers():
        model = load(f"init:tiny-{family}", dtype=torch.float64).model.eval()

    def run() -> Any:
        return model(ids(), use_cache=False).last_hidden_state

    with torch.no_grad():
        plain = run()
        with without_norms(model) as names:
            wanted = run()
        with operate(model, Surgery(norm="identity")):
            found = run()
    assert any("post_attention_layernorm" in name for name in names)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12 * float(wanted.abs().max()))
    assert float((wanted - plain).abs().max()) > 1e-3 * float(plain.abs().max())
