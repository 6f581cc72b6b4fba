"""What surgery changes does not depend on what modules and classes are called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rankscope import Surgery
from rankscope.errors import UnsupportedOperationError
from rankscope.surgery import grafting, operate
from rankscope.surgery.branch_grafts import MlpWeightGains
from tests.own_models import SelfAttention

DIM = 16


class Rescale(nn.Module):
    """Root mean square, and nothing in its name says so."""

    def __init__(self, width: int = DIM) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Renormalise(nn.Module):
    """Named like a norm, and divides by nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x


class Mlp(nn.Module):
    """With a norm of the stream's width inside, between its matrices, which is a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(DIM, DIM), Rescale(), nn.Linear(DIM, DIM)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.gain * self.inner(torch.tanh(self.up(self.gain * x))))
        return out


class Sandwich(nn.Module):
    """Norms before and after each branch, the ones after it called like attention and like a mixer."""

    NAMES = (
        ("attention", "mlp", "post_attention_norm", "post_mlp_norm"),
        ("mlp", "attn", "mixer_scale", "attention_out"),
        ("mix", "cross_attn", "conv_norm", "mamba"),
    )

    def __init__(self, names: tuple[str, ...], norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.names = names
        for name, part in zip(names, (SelfAttention(DIM, 2, causal=False), Mlp(), norm(), norm()), strict=True):
            self.add_module(name, part)
        self.before1, self.before2 = norm(), norm()
        self.plain = True

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp, after1, after2 = (getattr(self, name) for name in self.names)

        def normed(norm: nn.Module, x: Tensor) -> Tensor:
            out: Tensor = norm(x) if self.plain else x
            return out

        x = x + normed(after1, attention(normed(self.before1, x)))
        return x + normed(after2, mlp(normed(self.before2, x)))


def network(names: tuple[str, ...], norm: Callable[[], nn.Module] = Rescale) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Sandwich(names, norm) for _ in range(2))).double().eval()
    return model, torch.randn(2, 7, DIM, dtype=torch.float64)


@pytest.mark.parametrize("norm", [Rescale, lambda: nn.LayerNorm(DIM)], ids=["own", "torch"])
@pytest.mark.parametrize("names", Sandwich.NAMES, ids=str)
@torch.no_grad()
def test_norms_are_those_that_normalise(names: tuple[str, ...], norm: Callable[[], nn.Module]) -> None:
    model, x = network(names, norm)
    with operate(model, Surgery(norm="identity"), inputs=x):
        found = model(x)
    for block in model:
        block.plain = False
    torch.testing.assert_close(found, model(x), rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_a_module_called_norm_that_is_none_stays() -> None:
    model, x = network(Sandwich.NAMES[0])
    for block in model:
        block.before1 = Renormalise()
    with operate(model, Surgery(norm="identity"), inputs=x):
        found = model(x)
    for block in model:
        block.plain, block.before1.forward = False, lambda x: x
        block.attention.register_forward_pre_hook(lambda module, args: (2.0 * args[0],))
    torch.testing.assert_close(found, model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("names", Sandwich.NAMES, ids=str)
@torch.no_grad()
def test_weights_of_mlps_are_those_that_do_not_mix(names: tuple[str, ...]) -> None:
    model, x = network(names)
    with grafting(model, MlpWeightGains(0.5), inputs=x):
        found = model(x)
    for block in model:
        getattr(block, names[1]).gain = 0.5
    torch.testing.assert_close(found, model(x), rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_a_norm_that_was_not_met_before_is_refused() -> None:
    """It is in a module of the block, on inputs of another kind alone."""
    model, x = network(Sandwich.NAMES[0])
    with operate(model, Surgery(norm="identity"), inputs=x):
        model(x)
        model[1].mlp.register_forward_pre_hook(lambda module, args: (module.inner(args[0] + 0.0 * module.up(args[0])),))
        with pytest.raises(UnsupportedOperationError, match=r"norm='identity': block 1 \(1\).*It was not met"):
            model(x)
