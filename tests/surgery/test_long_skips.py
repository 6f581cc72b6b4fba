"""Skips that are not inside a block: scaled as the hand-cut network is, or refused by name.

And networks that look as if they had some and have none: those stay operable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankscope as rs
from rankscope.errors import InputError, LayoutError, SiteError, UnsupportedConfigError, UnsupportedOperationError
from rankscope.ext.offload.schedule import _only_stack
from rankscope.surgery.operating import operate
from rankscope.surgery.session import structure_of
from tests.own_models import SelfAttention

DIM, TOKENS = 16, 9


def held(x: Tensor, gain: float) -> Tensor:
    """The stream under the twin's knife; untouched at gain one."""
    return x if gain == 1 else gain * x


class Block(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention(DIM, 2, causal=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = held(x, self.gain) + self.attention(self.norm1(x))
        return held(x, self.gain) + self.mlp(self.norm2(x))


class Network(nn.Module):
    """``gain`` is the knife of the hand-cut twin, on the long skips alone; blocks have their own."""

    depth = 4
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(self.depth))
        self.merge = nn.Linear(2 * DIM, DIM)
        self.back = nn.Linear(DIM, DIM)
        self.gains = nn.Parameter(torch.tensor([0.8, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class UNet(Network):
    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.embed(x), []
        for block in self.blocks[:2]:
            x = block(x)
            kept.append(x)
        x = self.blocks[2](x + kept.pop())  # twice the same state, which goes around nothing
        return self.blocks[3](x + held(kept.pop(), self.gain))


class UNetByConcatenation(Network):
    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.embed(x), []
        for block in self.blocks[:2]:
            x = block(x)
            kept.append(x)
        x = self.blocks[2](self.merge(torch.cat([x, kept.pop()], dim=-1)))
        return self.blocks[3](self.merge(torch.cat([x, held(kept.pop(), self.gain)], dim=-1)))


class UNetByProjection(Network):
    def forward(self, x: Tensor) -> Tensor:
        x = first = self.embed(x)
        for block in self.blocks[:3]:
            x = block(x)
        return self.blocks[3](x + self.back(first))


class InputInjection(Network):
    """One block looped, with the input added again in each round."""

    def forward(self, x: Tensor) -> Tensor:
        x = start = self.embed(x)
        for number in range(3):
            x = self.blocks[0](x + held(start, self.gain if number else 1.0))
        return x


class ResidualLambdas(Network):
    def forward(self, x: Tensor) -> Tensor:
        x = start = nn.functional.rms_norm(self.embed(x), (DIM,))
        for number, block in enumerate(self.blocks):
            x = block(self.gains[0] * x + self.gains[1] * held(start, self.gain if number else 1.0))
        return x


class AroundTwoBlocks(Network):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = held(x, self.gain) + second(first(x))
        return x


class AroundEverything(Network):
    def forward(self, x: Tensor) -> Tensor:
        x = start = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.back(x + held(start, self.gain))


class KeepingBlock(Block):
    """Adds what an earlier block left in an attribute."""

    kept: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.kept.append(x)
        return out + held(self.kept[0], self.gain) if len(self.kept) > 2 else out


class ThroughAnAttribute(Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeepingBlock() for _ in range(self.depth))

    def forward(self, x: Tensor) -> Tensor:
        KeepingBlock.kept.clear()
        out = super().forward(x)
        KeepingBlock.kept.clear()
        return out


class TupleBlock(Block):
    def forward(self, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x) + 0.1 * start, start


class ThroughATuple(Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TupleBlock() for _ in range(self.depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        state = (x, x)
        for block in self.blocks:
            state = block(*state)
        return state[0]


class BottleneckBlock(nn.Module):
    """As in MobileBERT: attention at half the width, with skips of its own there, inside one outer skip."""

    def __init__(self) -> None:
        super().__init__()
        half = DIM // 2
        self.down, self.shared, self.up = nn.Linear(DIM, half), nn.Linear(DIM, half), nn.Linear(half, DIM)
        self.attention = SelfAttention(half, 2, causal=False)
        self.mlp = nn.Sequential(nn.Linear(half, DIM), nn.GELU(), nn.Linear(DIM, half))

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.down(x)
        narrow = narrow + self.attention(self.shared(x))
        narrow = narrow + self.mlp(narrow)
        return x + self.up(narrow)


class Bottleneck(Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BottleneckBlock() for _ in range(self.depth))


SCALED = {
    UNet: "blocks 1 to 2: torch.add in the model itself",
    UNetByConcatenation: "blocks 1 to 2: torch.cat in the model itself",
    InputInjection: "block 0: torch.add in the model itself",
    ResidualLambdas: "block 0: torch.add in the model itself",
    AroundTwoBlocks: "blocks 0 to 1: torch.add in the model itself",
    AroundEverything: "blocks 0 to 3: torch.add in the model itself",
    ThroughAnAttribute: "blocks 0 to 1: torch.add in blocks.2",
}
REFUSED = {
    UNetByProjection: "blocks 0 to 2: torch.add in the model itself",
    Bottleneck: "block 0: torch.add in blocks.0",
}


def tokens() -> Tensor:
    return torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(5)).double()


def made(kind: type[Network]) -> Network:
    torch.manual_seed(0)
    return kind().double().eval()


@contextmanager
def cut_by_hand(model: Network, gain: float) -> Iterator[None]:
    parts = [model, *model.blocks]
    for part in parts:
        part.gain = gain
    try:
        yield
    finally:
        for part in parts:
            del part.gain


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", SCALED)
def test_a_long_skip_is_scaled_as_by_hand(kind: type[Network]) -> None:
    model, x = made(kind), tokens()
    with torch.no_grad():
        bare = model(x)
        with operate(model, rs.Surgery(skip=2.0), inputs=x), operate(model, rs.Surgery(skip=0.5)):
            assert torch.equal(model(x), bare)
        for gain in (0.0, 0.5):
            with operate(model, rs.Surgery(skip=gain), inputs=x):
                got = model(x)
            with cut_by_hand(model, gain):
                want = model(x)
            assert bool((got - want).norm() <= 1e-12 * want.norm()), gain
            assert not torch.equal(got, bare)
        assert torch.equal(model(x), bare)
    report = rs.doctor(model, x)
    assert SCALED[kind] in report["long skips"].detail


@pytest.mark.parametrize("kind", REFUSED)
def test_a_skip_outside_of_blocks_is_refused_by_name(kind: type[Network]) -> None:
    model, x = made(kind), tokens()
    with pytest.raises(UnsupportedOperationError) as caught, operate(model, rs.Surgery(skip=0.0), inputs=x):
        pytest.fail("it must be refused before anything runs")
    assert REFUSED[kind] in str(caught.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_no_verb_cuts_half_of_it(kind: type[Network]) -> None:
    model, x = made(kind), tokens().float()
    model = model.float()
    with pytest.raises(UnsupportedOperationError, match="gets around blocks"):
        rs.exact(model, x, rs.Surgery(skip=0.0))
    run = rs.ablate(model, x, variants=["+norm+mlp", "full"])
    assert set(run.table["variant"].to_pylist()) == {"full"}
    assert any("+norm+mlp under the mask own was left out" in note and "gets around" in note for note in run.notes)
    report = rs.doctor(model, x)
    assert report["uncut skips"].status == "refused"


@pytest.mark.parametrize("kind", [UNet, *REFUSED])
def test_what_needs_a_sum_of_paths_refuses_every_long_skip(kind: type[Network]) -> None:
    model, x = made(kind).float(), tokens().float()
    with pytest.raises(UnsupportedOperationError, match="gets around blocks"):
        rs.decompose(model, x)
    with pytest.raises(InputError, match="gets around blocks"):
        rs.remedy(model, x, remedies=["residual_scale"], gradients=False)


def test_a_long_skip_is_scaled_with_all_blocks_it_goes_around_or_not_at_all() -> None:
    model, x = made(UNet), tokens()
    with torch.no_grad():
        for layers, gain in (([1, 2], 0.5), ([0, 3], 1.0)):
            with operate(model, rs.Surgery(skip=0.5, layers=layers), inputs=x):
                got = model(x)
            with cut_by_hand(model, 1.0):
                model.gain = gain
                for layer in layers:
                    model.blocks[layer].gain = 0.5
                want = model(x)
            assert bool((got - want).norm() <= 1e-12 * want.norm()), layers
    for layer in (1, 2):
        with (
            pytest.raises(UnsupportedOperationError, match="names only some"),
            operate(model, rs.Surgery(skip=0, layers=[layer])),
        ):
            pytest.fail("it must be refused before anything runs")
    with pytest.raises(UnsupportedOperationError, match="must agree"), operate(model, rs.Surgery(attention_skip=0.0)):
        pytest.fail("it must be refused before anything runs")


def test_gradients_flow_through_a_scaled_long_skip() -> None:
    model, x = made(UNet), tokens()
    with operate(model, rs.Surgery(skip=0.5), inputs=x):
        model(x).square().sum().backward()
    ours = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with cut_by_hand(model, 0.5):
        model(x).square().sum().backward()
    theirs = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(ours) == len(theirs) > 0
    for got, want in zip(ours, theirs, strict=True):
        assert bool((got - want).norm() <= 1e-10 * want.norm())


class Checkpointed(UNet):
    def forward(self, x: Tensor) -> Tensor:
        x = first = checkpoint(self.blocks[0], self.embed(x), use_reentrant=False)
        for block in self.blocks[1:3]:
            x = checkpoint(block, x, use_reentrant=False)
        return checkpoint(self.blocks[3], x + first, use_reentrant=False)


def test_a_repeated_block_does_not_run_with_another_gain() -> None:
    """In the backward pass the states are no longer known by their tensors, so nothing is repeated unchanged."""
    model, x = made(Checkpointed), tokens()
    with operate(model, rs.Surgery(skip=0.5), inputs=x):
        out = model(x).sum()
        with pytest.raises(UnsupportedOperationError, match="gradient checkpointing"):
            out.backward()


class Switching(UNet):
    """Leaves its long skip out, or adds another, after it has been looked at."""

    brings_back = 0

    def forward(self, x: Tensor) -> Tensor:
        states = [self.embed(x)]
        for number, block in enumerate(self.blocks):
            x = states[-1]
            if number == 3 and self.brings_back is not None:
                x = x + states[self.brings_back]
            states.append(block(x))
        return states[-1]


def test_another_path_than_the_one_that_was_seen_is_not_scaled_in_silence() -> None:
    model, x = made(Switching), tokens()
    with torch.no_grad(), operate(model, rs.Surgery(skip=0.5), inputs=x):
        model(x)
        model.brings_back = None
        with pytest.raises(UnsupportedOperationError, match="not met in this pass"):
            model(x)
        model.brings_back = 1
        with pytest.raises(SiteError, match="another path"):
            model(x)


@pytest.mark.parametrize("kind", [UNet, UNetByConcatenation])
def test_a_model_that_needs_earlier_states_is_not_run_one_block_at_a_time(kind: type[Network]) -> None:
    """Offloading keeps the last state only, and would bring back zeros."""
    model, x = made(kind), tokens()
    with pytest.raises(UnsupportedConfigError, match="carries the output of a block around later ones"):
        _only_stack(structure_of(model, x))
    assert _only_stack(structure_of(made(AroundEverything), x)).depth == 4


def test_a_skip_through_a_tuple_leaves_the_stream_unknown() -> None:
    """Which of two tensors is the stream is asked before any skip: the user declares it, or nothing runs."""
    model, x = made(ThroughATuple), tokens()
    with (
        pytest.raises(LayoutError, match=r"blocks\.0 returns several tensors"),
        operate(model, rs.Surgery(skip=0.0), inputs=x),
    ):
        pytest.fail("it must be refused before anything runs")
    with pytest.raises(LayoutError, match=r"blocks\.0 returns several tensors"):
        rs.measure(model, x)


@pytest.mark.parametrize("kind", [*SCALED, *REFUSED])
def test_what_does_not_concern_skips_stays_possible(kind: type[Network]) -> None:
    model, x = made(kind), tokens()
    with torch.no_grad():
        bare = model(x)
        with operate(model, rs.Surgery(temperature=2.0), inputs=x):
            assert not torch.equal(model(x), bare)


class RmsNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class BusyBlock(nn.Module):
    """Much that meets, and no skip beside the two: rotations, gated MLP, gated attention, routing, positions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention(DIM, 2, causal=False)
        self.gate, self.up, self.down = (nn.Linear(DIM, DIM) for _ in range(3))
        self.router = nn.Linear(DIM, 2)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.norm1, self.norm2 = RmsNorm(), RmsNorm()
        self.latents = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        h = self.norm1(x) + position
        y = self.attention(torch.cat([h, self.latents(h)], dim=1))[:, : x.shape[1]]
        y = y * torch.sigmoid(self.gate(h))
        y = y * y.cos() + y.flip(-1) * y.sin()
        x = x + y
        h = self.norm2(x)
        weights = self.router(h).softmax(-1)
        routed = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            routed += expert(h * weights[..., number : number + 1])
        inner = self.up(routed)
        inner = 0.5 * inner * (1 + torch.tanh(0.8 * (inner + 0.044715 * inner**3)))
        return x + self.down(inner * self.gate(h))


class Busy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BusyBlock() for _ in range(3))
        self.position = nn.Parameter(torch.randn(TOKENS, DIM))
        self.before = nn.Conv1d(DIM, DIM, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.before(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.position
        for block in self.blocks:
            x = block(x, self.position)
        return x


def test_what_only_looks_like_a_long_skip_is_operated() -> None:
    torch.manual_seed(0)
    model, x = Busy().double().eval(), tokens()
    with torch.no_grad():
        bare = model(x)
        with operate(model, rs.Surgery(skip=0.0), inputs=x):
            cut = model(x)
        want = x + model.before(x.transpose(1, 2)).transpose(1, 2) + model.position
        for block in model.blocks:
            full = block(want, model.position)
            # The block minus its skips: h is what attention gives, and the MLP reads that.
            attended = _attended(block, want, model.position)
            want = _fed(block, attended)
            assert full.shape == want.shape
    assert not torch.equal(cut, bare)
    assert bool((cut - want).norm() <= 1e-12 * want.norm())


def _attended(block: BusyBlock, x: Tensor, position: Tensor) -> Tensor:
    h = block.norm1(x) + position
    y = block.attention(torch.cat([h, block.latents(h)], dim=1))[:, : x.shape[1]]
    y = y * torch.sigmoid(block.gate(h))
    return y * y.cos() + y.flip(-1) * y.sin()


def _fed(block: BusyBlock, x: Tensor) -> Tensor:
    h = block.norm2(x)
    weights = block.router(h).softmax(-1)
    routed = sum(expert(h * weights[..., n : n + 1]) for n, expert in enumerate(block.experts))
    inner = block.up(routed)
    inner = 0.5 * inner * (1 + torch.tanh(0.8 * (inner + 0.044715 * inner**3)))
    return block.down(inner * block.gate(h))
