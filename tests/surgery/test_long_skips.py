"""Skips that are not inside a block, on networks of ``tests/hostile``, which holds every edit of them against a twin.

Here: what the doctor says of them, what refuses them, and what becomes of them in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankscope as rs
from rankscope.errors import InputError, LayoutError, SiteError, UnsupportedConfigError, UnsupportedOperationError
from rankscope.ext.offload.schedule import _only_stack
from rankscope.surgery.operating import operate
from rankscope.surgery.session import structure_of
from tests.hostile.across import LongSkips
from tests.hostile.harness import assert_close
from tests.hostile.parts import Block, Net, drawn, ids
from tests.hostile.suite import CASES
from tests.hostile.twin import WHOLE, Cut

SCALED = {
    "long_skips": "block 2: torch.add in the model itself; blocks 1 to 3: torch.add in the model itself",
    "long_skips_by_cat": "block 2: torch.cat in the model itself; blocks 1 to 3: torch.cat in the model itself",
    "around_two_with_own": "blocks 0 to 1: torch.add in the model itself",
    "embedding_at_the_end": "blocks 0 to 2: torch.add in the model itself",
    "attribute_of_the_model": "block 2: torch.add in the model itself; blocks 1 to 3: torch.add in the model itself",
}
REFUSED = {
    "long_skips_projected": "torch.add in the model itself",
    "bottleneck": "block 0: torch.add in blocks.0",
}


def made(kind: type[Net]) -> nn.Module:
    return drawn(kind().double(), 0).eval()


def of(name: str) -> nn.Module:
    return CASES[name].model()


@pytest.mark.parametrize("name", SCALED)
def test_the_doctor_names_them(name: str) -> None:
    assert SCALED[name] in rs.doctor(of(name), ids())["long skips"].detail


@pytest.mark.parametrize("name", REFUSED)
def test_no_verb_cuts_half_of_it(name: str) -> None:
    model = of(name).float()
    with pytest.raises(UnsupportedOperationError, match="gets around blocks") as caught:
        rs.exact(model, ids(), rs.Surgery(skip=0.0))
    assert REFUSED[name] in str(caught.value)
    run = rs.ablate(model, ids(), variants=["+norm+mlp", "full"])
    assert set(run.table["variant"].to_pylist()) == {"full"}
    assert any("+norm+mlp under the mask own was left out" in note and "gets around" in note for note in run.notes)
    assert rs.doctor(model, ids())["uncut skips"].status == "refused"


@pytest.mark.parametrize("name", ["long_skips", *REFUSED])
def test_what_needs_a_sum_of_paths_refuses_every_long_skip(name: str) -> None:
    model = of(name).float()
    with pytest.raises(UnsupportedOperationError, match="gets around blocks"):
        rs.decompose(model, ids())
    with pytest.raises(InputError, match="gets around blocks"):
        rs.remedy(model, ids(), remedies=["residual_scale"], gradients=False)


def test_a_long_skip_is_scaled_with_all_blocks_it_goes_around_or_not_at_all() -> None:
    case = CASES["long_skips"]
    model, inputs = case.model(), case.given()
    with torch.no_grad():
        for layers, gain in (([1, 2, 3], 0.5), ([0, 4], 1.0)):
            with operate(model, rs.Surgery(skip=0.5, layers=layers), inputs=inputs):
                got = model(inputs)
            assert_close(got, by_hand(model, inputs, layers, gain))
    for layer in (1, 2):
        with (
            pytest.raises(UnsupportedOperationError, match="names only some"),
            operate(model, rs.Surgery(skip=0, layers=[layer])),
        ):
            pytest.fail("it must be refused before anything runs")
    with pytest.raises(UnsupportedOperationError, match="must agree"), operate(model, rs.Surgery(attention_skip=0.0)):
        pytest.fail("it must be refused before anything runs")


def by_hand(model: Any, inputs: Tensor, layers: list[int], long: float) -> Tensor:
    """Blocks in ``layers`` with half of their skips, and a gain on both long skips."""
    x, states = model.start_twin(inputs), []
    for layer, block in enumerate(model.blocks):
        if layer > 2:
            x = model.met(x, states[4 - layer], layer, long)
        x = block.twin(x, Cut(skip=0.5) if layer in layers else WHOLE)
        states.append(x)
    return model.close_twin(x)


def test_gradients_flow_through_a_scaled_long_skip() -> None:
    case = CASES["long_skips"]
    model, inputs = case.model(), case.given()
    parameters = [one for name, one in model.named_parameters() if "key" not in name]
    with operate(model, rs.Surgery(skip=0.5), inputs=inputs):
        ours = torch.autograd.grad(model(inputs).square().sum(), parameters)
    theirs = torch.autograd.grad(model.twin(Cut(skip=0.5), inputs).output.square().sum(), parameters)
    for got, want in zip(ours, theirs, strict=True):
        assert bool((got - want).norm() <= 1e-10 * want.norm())


class Checkpointed(LongSkips):
    def forward(self, ids: Tensor) -> Tensor:
        x = first = checkpoint(self.blocks[0], self.start(ids), use_reentrant=False)
        for block in self.blocks[1:4]:
            x = checkpoint(block, x, use_reentrant=False)
        return self.close(checkpoint(self.blocks[4], x + first, use_reentrant=False))


def test_a_repeated_block_does_not_run_with_another_gain() -> None:
    """In the backward pass the states are no longer known by their tensors, so nothing is repeated unchanged."""
    model = made(Checkpointed)
    with operate(model, rs.Surgery(skip=0.5), inputs=ids()):
        out = model(ids()).sum()
        with pytest.raises(UnsupportedOperationError, match="gradient checkpointing"):
            out.backward()


class Switching(Net):
    """Leaves its long skip out, or adds another, after it has been looked at."""

    brings_back: int | None = 0

    def __init__(self) -> None:
        super().__init__(Block, depth=4)

    def forward(self, ids: Tensor) -> Tensor:
        states = [self.start(ids)]
        for number, block in enumerate(self.blocks):
            x = states[-1]
            if number == 3 and self.brings_back is not None:
                x = x + states[self.brings_back]
            states.append(block(x))
        return self.close(states[-1])


def test_another_path_than_the_one_that_was_seen_is_not_scaled_in_silence() -> None:
    model = made(Switching)
    with torch.no_grad(), operate(model, rs.Surgery(skip=0.5), inputs=ids()):
        model(ids())
        model.brings_back = None
        with pytest.raises(UnsupportedOperationError, match="not met in this pass"):
            model(ids())
        model.brings_back = 1
        with pytest.raises(SiteError, match="another path"):
            model(ids())


@pytest.mark.parametrize("name", ["long_skips", "long_skips_by_cat"])
def test_a_model_that_needs_earlier_states_is_not_run_one_block_at_a_time(name: str) -> None:
    """Offloading keeps the last state only, and would bring back zeros."""
    with pytest.raises(UnsupportedConfigError, match="carries the output of a block around later ones"):
        _only_stack(structure_of(of(name), ids()))
    assert _only_stack(structure_of(of("embedding_at_the_end"), ids())).depth == 3


class TupleBlock(Block):
    def forward(self, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x) + 0.1 * start, start


class ThroughATuple(Net):
    def __init__(self) -> None:
        super().__init__(TupleBlock)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        state = (x, x)
        for block in self.blocks:
            state = block(*state)
        return self.close(state[0])


@pytest.mark.parametrize(
    "verb", [rs.measure, lambda model, x: operate(model, rs.Surgery(skip=0.0), inputs=x).__enter__()]
)
def test_a_skip_through_a_tuple_leaves_the_stream_unknown(verb: Callable[..., object]) -> None:
    """Which of two tensors is the stream is asked before any skip: the user declares it, or nothing runs."""
    with pytest.raises(LayoutError, match=r"blocks\.0 returns several tensors"):
        verb(made(ThroughATuple), ids())
