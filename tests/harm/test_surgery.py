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
from torch.utils.checkpoint import checkpoint

from rankscope import Surgery
from rankscope.errors import UnsupportedOperationError
from rankscope.models.loading import load
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.surgery.operating import operate
from tests.own_models import Block, ids

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
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
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
