"""Gradient checkpointing runs blocks again in the backward pass: they must be cut again, and the right ones."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from rankscope import Surgery
from rankscope.errors import SiteError, UnsupportedOperationError
from rankscope.models.loading import load
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.surgery.operating import operate
from tests.loops import case
from tests.own_models import Block, checkpointed, ids

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
OPERATIONS: dict[str, dict[str, Any]] = {
    "pure attention": {"skip": 0.0, "mlp": "drop"},
    "one layer": {"attention_skip": 0.5, "mlp_skip": -1.0, "layers": 1},
    "attention": {"mask": "window(2)", "mask_mode": "intersect", "temperature": 2.0, "heads": [1]},
    "centred": {"attention": "centred", "layers": [0, 2]},
    "norm": {"norm": "scale", "skip": 0.5, "layers": [1, 2]},
}


def gradients(model: nn.Module, run: Callable[[], Tensor], operation: dict[str, Any], inputs: Any) -> list[Tensor]:
    model.zero_grad()
    with operate(model, Surgery(**operation), inputs=inputs):
        run().square().sum().backward()
    assert not _get_current_function_mode_stack()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    scale = max(float(b.abs().max()) for b in want)
    assert len(got) == len(want) > 0
    assert all(float((a - b).abs().max()) <= 1e-12 * scale for a, b in zip(got, want, strict=True))


@cache
def family(name: str) -> Any:
    with quiet_transformers():
        model = load(f"init:{name}", dtype=torch.float64).model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["tiny-bert", "tiny-llama", "tiny-gpt-neox"])
@REENTRANT
def test_transformers(name: str, operation: str, reentrant: bool) -> None:
    model, changes = copy.deepcopy(family(name)), OPERATIONS[operation]
    if name == "tiny-gpt-neox" and operation == "one layer":
        changes = {"skip": 0.5, "mlp": "drop", "layers": 1}
    config = model.config
    config.attention_probs_dropout_prob = config.attention_dropout = 0.0
    options = {} if name == "tiny-bert" else {"use_cache": False}

    def run() -> Tensor:
        embedded = model.get_input_embeddings()(ids())
        return model(inputs_embeds=embedded, **options).last_hidden_state

    want = gradients(model, run, changes, None)
    uncut = gradients(model, run, {}, None)
    checkpointed(model, use_reentrant=reentrant)
    if reentrant and hasattr(model, "activation_checkpointing_enable"):
        # Since transformers 5.23 the backward pass runs parts of a block, not the block, and no hook of the block.
        with pytest.raises(UnsupportedOperationError, match="Checkpoint with use_reentrant=False"):
            gradients(model, run, changes, None)
        return
    got = gradients(model, run, changes, None)
    assert_equal(got, want)
    with pytest.raises(AssertionError):
        assert_equal(uncut, want)


class Shared(nn.Module):
    """One block called four times; ``how`` says which calls are run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(32, 4, "pre", True)])
        self.how: Callable[[nn.Module, Tensor], Tensor] = Shared.plain

    def forward(self, x: Tensor) -> Tensor:
        return (self.how if torch.is_grad_enabled() else Shared.plain)(self.layers[0], x)

    @staticmethod
    def plain(block: nn.Module, x: Tensor) -> Tensor:
        for _ in range(4):
            x = block(x)
        return x

    @staticmethod
    def each(block: nn.Module, x: Tensor, reentrant: bool, which: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        for number in range(4):
            x = checkpoint(block, x, use_reentrant=reentrant) if number in which else block(x)
        return x

    @staticmethod
    def segments(block: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
        return checkpoint_sequential([block] * 4, 2, x, use_reentrant=reentrant)

    @staticmethod
    def whole(block: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
        out: Tensor = checkpoint(partial(Shared.plain, block), x, use_reentrant=reentrant)
        return out


WAYS = {
    "each": Shared.each,
    "second and third": partial(Shared.each, which=(1, 2)),
    "first only": partial(Shared.each, which=(0,)),
    "two segments": Shared.segments,
    "all at once": Shared.whole,
}
PLACES: dict[str, dict[str, Any]] = {
    "layer 1": {"skip": 0.5, "layers": 1},
    "layer 2": {"attention_skip": 0.0, "temperature": 3.0, "layers": 2},
    "layers 0 and 3": {"norm": "identity", "mask": "window(1)", "mask_mode": "intersect", "layers": [0, 3]},
}


def shared() -> tuple[Shared, Tensor]:
    torch.manual_seed(0)
    model = Shared().double().train()
    return model, torch.randn(2, 7, 32, dtype=torch.float64).requires_grad_()


@REENTRANT
def test_one_block_for_all_layers(reentrant: bool) -> None:
    model, x = shared()
    gradients(model, lambda: model(x), {}, x.detach())  # its structure is known from here on
    want = {place: gradients(model, lambda: model(x), changes, None) for place, changes in PLACES.items()}
    for place, other in itertools.permutations(PLACES, 2):
        with pytest.raises(AssertionError):
            assert_equal(want[other], want[place])
    for way, how in WAYS.items():
        model.how = partial(how, reentrant=reentrant)
        for place, changes in PLACES.items():
            with case(way, place):
                assert_equal(gradients(model, lambda: model(x), changes, None), want[place])


@REENTRANT
def test_two_passes_before_one_backward_pass(reentrant: bool) -> None:
    model, x = shared()

    def run() -> Tensor:
        first = model(x)
        with torch.no_grad():
            model(x.flip(1))
        return first + model(2 * x)

    want = gradients(model, run, PLACES["layer 1"], x.detach())
    model.how = partial(Shared.each, reentrant=reentrant)
    assert_equal(gradients(model, run, PLACES["layer 1"], x.detach()), want)


@pytest.mark.parametrize("way", ["torch.autograd.backward", "torch.autograd.grad"])
def test_other_ways_into_autograd(way: str) -> None:
    model, x = shared()
    parameters = list(model.parameters())
    want = gradients(model, lambda: model(x), PLACES["layer 1"], x.detach())
    model.how = partial(Shared.each, reentrant=False)
    model.zero_grad()
    with operate(model, Surgery(**PLACES["layer 1"]), inputs=x.detach()):
        loss = model(x).square().sum()
        if way == "torch.autograd.grad":
            got = list(torch.autograd.grad(loss, parameters))
        else:
            torch.autograd.backward(loss)
            got = [p.grad for p in parameters if p.grad is not None]
    assert_equal(got, want)


class InParts(nn.Module):
    def __init__(self, part: str, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Partly(part, reentrant) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Partly(Block):
    """Checkpoints a part of itself, in its own call."""

    def __init__(self, part: str, reentrant: bool) -> None:
        super().__init__(32, 4, "pre", True)
        self.part, self.reentrant = part, reentrant

    def again(self, part: str, run: Callable[..., Tensor], *given: Tensor) -> Tensor:
        if part not in self.part.split(", ") or not torch.is_grad_enabled():
            return run(*given)
        out: Tensor = checkpoint(run, *given, use_reentrant=self.reentrant)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.again("all", self.sublayers, x)

    def sublayers(self, x: Tensor) -> Tensor:
        x = x + self.again("attention", lambda y: self.attention(self.norm1(y)), x)
        y = self.again("norm", self.norm2, x)
        return self.again("sum", lambda a, b: a + self.mlp(b), x, y)


@pytest.mark.parametrize("part", ["all", "attention", "norm", "sum", "norm, sum", "attention, norm, sum"])
def test_parts_of_a_block(part: str) -> None:
    """The first block to run again is the last: each part has to find its own block."""
    x = torch.randn(2, 7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, model = (InParts(which, False).double() for which in ("", part))
    for name, changes in {**PLACES, **OPERATIONS, "skip": {"attention_skip": 0.5, "mlp_skip": 0.25}}.items():
        with case(name):
            want = gradients(plain, lambda: plain(x.requires_grad_()), changes, x.detach())
            got = gradients(model, lambda: model(x.requires_grad_()), changes, x.detach())
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_checkpoint_in_another_one_is_refused() -> None:
    """The outer one keeps the inputs of the inner one, and returns other tensors."""
    model = InParts("all, attention", False).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    with (
        pytest.raises(SiteError, match=r"runs a part again, and not as in the forward pass.*Checkpoint whole blocks"),
        operate(model, Surgery(skip=0.5), inputs=x),
    ):
        model(x.requires_grad_()).sum().backward()


def test_one_backward_pass_after_another() -> None:
    model = InParts("all", False).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    with operate(model, Surgery(skip=0.5, temperature=2.0), inputs=x):
        loss = model(x.requires_grad_()).square().sum()
        first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("part", ["attention", "sum", "all"])
def test_parts_that_lose_track_of_tensors_are_refused(part: str) -> None:
    """A reentrant checkpoint runs a part on other tensors, of which it is not known which is the stream."""
    model = InParts(part, True).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    with (
        pytest.raises(UnsupportedOperationError, match=r"again by itself.*use_reentrant=False"),
        operate(model, Surgery(norm="identity"), inputs=x),
    ):
        model(x.requires_grad_()).sum().backward()
    assert not _get_current_function_mode_stack()
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0
