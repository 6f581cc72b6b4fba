"""Every form in which a network can carry its stream: edited as the hand-cut twin is, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope.errors import UnsupportedOperationError
from rankscope.surgery.operating import operate
from tests.own_models import SelfAttention

DIM = 16
Block = Callable[["FormBlock", Tensor, Tensor, float], Tensor]
"""One residual step of a block: its parameters, the stream, the branch, and the gain on what is carried (1: uncut)."""


class FormBlock(nn.Module):
    """A pre-norm block whose two skips are written in one form; ``gain`` is the twin's knife."""

    def __init__(self, form: Callable[..., Tensor]) -> None:
        super().__init__()
        self.form = form
        self.attention = SelfAttention(DIM, 2, causal=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.channels = nn.Parameter(0.5 + torch.rand(DIM))
        self.gate = nn.Linear(DIM, DIM)
        self.register_buffer("position", torch.randn(1, 9, DIM))
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.form(self, x, lambda y: self.attention(self.norm1(y)), self.gain)
        return self.form(self, x, lambda y: self.mlp(self.norm2(y)), self.gain)


class Net(nn.Module):
    def __init__(self, form: Callable[..., Tensor], depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FormBlock(form) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def plain(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return x + f(x) if g == 1 else g * x + f(x)


def alpha_one(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return torch.add(x, f(x), alpha=1.0) if g == 1 else g * x + f(x)


def alpha_on_branch(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return x.add(f(x), alpha=0.3) if g == 1 else g * x + 0.3 * f(x)


def alpha_on_stream(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return torch.add(f(x), x, alpha=0.3) if g == 1 else g * 0.3 * x + f(x)


def alpha_in_place(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return x.clone().add_(f(x), alpha=0.3) if g == 1 else g * x + 0.3 * f(x)


def scalar_gain(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return m.scalar * x + f(x) if g == 1 else g * m.scalar * x + f(x)


def channel_gain(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return x * m.channels + f(x) if g == 1 else g * m.channels * x + f(x)


def computed_gain(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return torch.sigmoid(m.scalar) * x + f(x) if g == 1 else g * torch.sigmoid(m.scalar) * x + f(x)


def input_gate(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return torch.sigmoid(m.gate(x)) * x + f(x) if g == 1 else g * torch.sigmoid(m.gate(x)) * x + f(x)


def highway(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    t = torch.sigmoid(m.gate(x))
    return t * f(x) + (1 - t) * x if g == 1 else t * f(x) + g * (1 - t) * x


def divided(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return x / 2**0.5 + f(x) if g == 1 else g * x / 2**0.5 + f(x)


def minus_minus(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return x - (-f(x)) if g == 1 else g * x + f(x)


def subtracted(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return torch.sub(f(x), x, alpha=0.5) if g == 1 else f(x) - g * 0.5 * x


def negated(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return f(x) - (-x) if g == 1 else f(x) + g * x


def addcmul(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return torch.addcmul(x, m.channels, f(x), value=0.5) if g == 1 else g * x + 0.5 * m.channels * f(x)


def addcmul_of_stream(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return torch.addcmul(f(x), m.channels, x) if g == 1 else g * m.channels * x + f(x)


def lerp(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return torch.lerp(x, f(x), m.channels) if g == 1 else g * (1 - m.channels) * x + m.channels * f(x)


def lerp_number(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return torch.lerp(f(x), x, 0.25) if g == 1 else g * 0.25 * x + 0.75 * f(x)


def baddbmm(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    weight = m.gate.weight.expand(x.shape[0], -1, -1)
    return torch.baddbmm(x, f(x), weight) if g == 1 else g * x + f(x) @ weight


def addmm(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    flat, branch = x.reshape(-1, DIM), f(x).reshape(-1, DIM)
    added = torch.addmm(flat, branch, m.gate.weight) if g == 1 else g * flat + branch @ m.gate.weight
    return added.view(x.shape)


def built_in_sum(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return sum([x, f(x)]) if g == 1 else g * x + f(x)


def position_first(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    x = x + m.position
    return x + f(x) if g == 1 else g * x + f(x)


class OwnSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def own_function(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return OwnSum.apply(x, f(x)) if g == 1 else g * x + f(x)


def where(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return torch.where(x > 0, x, f(x)) if g == 1 else torch.where(x > 0, g * x, f(x))


def stacked(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return torch.stack([x, f(x)]).sum(0) if g == 1 else g * x + f(x)


def side_by_side(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return torch.cat([x[None], f(x)[None]]).sum(0) if g == 1 else g * x + f(x)


def concatenated(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    both = torch.cat([g * x, f(x)], dim=-1)
    return both @ torch.cat([m.gate.weight, m.gate.weight])


def einsummed(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return torch.einsum("s,sbtd->btd", x.new_tensor([1.0, 0.5]), torch.stack([g * x, f(x)]))


def written_into(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    out = f(x)
    out[:, :, :8] += g * x[:, :, :8]
    return out


def gated_alone(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return x * torch.sigmoid(f(x))


def projected(m: FormBlock, x: Tensor, f: Callable[[Tensor], Tensor], g: float) -> Tensor:
    return m.gate(x) + f(x)


EDITED = (
    plain, alpha_one, alpha_on_branch, alpha_on_stream, alpha_in_place, scalar_gain, channel_gain, computed_gain,
    input_gate, highway, divided, minus_minus, subtracted, negated, addcmul, addcmul_of_stream, lerp, lerp_number,
    baddbmm, addmm, built_in_sum, position_first, own_function, where, stacked, concatenated, einsummed,
)  # fmt: skip
REFUSED = (side_by_side, written_into, gated_alone, projected)


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(3)).to(dtype)


def net(form: Callable[..., Tensor], seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(form).double().eval()


def by_hand(model: Net, x: Tensor, gain: float) -> Tensor:
    for block in model.blocks:
        block.gain = gain
    try:
        with torch.no_grad():
            return model(x)
    finally:
        for block in model.blocks:
            block.gain = 1.0


def close(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).norm() <= 1e-12 * want.norm())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", EDITED, ids=lambda form: form.__name__)
def test_a_skip_in_this_form_is_edited_as_by_hand(form: Callable[..., Tensor]) -> None:
    model, x = net(form), tokens()
    with torch.no_grad():
        bare = model(x)
    with operate(model, inputs=x), torch.no_grad():
        assert torch.equal(model(x), bare)
    for gain in (0.0, 0.5):
        with operate(model, rs.Surgery(skip=gain), inputs=x), torch.no_grad():
            got = model(x)
        assert close(got, by_hand(model, x, gain)), gain
        assert not close(got, bare)
    with torch.no_grad():
        assert torch.equal(model(x), bare)


@pytest.mark.parametrize("form", REFUSED, ids=lambda form: form.__name__)
def test_a_skip_in_this_form_is_refused_by_name(form: Callable[..., Tensor]) -> None:
    model, x = net(form), tokens()
    for gain in (0.0, 0.5):
        with (
            pytest.raises(UnsupportedOperationError, match=r"blocks?\.?.*0.* in blocks\.0"),
            operate(rs.Model(model, blocks="blocks.*"), rs.Surgery(skip=gain), inputs=x),
        ):
            pytest.fail("it must be refused before anything runs")
    assert "refused" in str(rs.doctor(rs.Model(model, blocks="blocks.*"), x))
