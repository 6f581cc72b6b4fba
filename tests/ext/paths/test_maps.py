"""Frozen norms and gains: what is read off a call of a norm, against the norm written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rankscope.ext.paths.maps import (
    IDENTITY,
    Chain,
    FrozenNorm,
    Gain,
    NormCall,
    departure,
    explain,
    frozen_norm,
    tolerance,
)

F64 = torch.float64


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


X = numbers(2, 5, 8) + 0.7
GAIN, SHIFT = numbers(8, seed=1), numbers(8, seed=2)


class OneMore(nn.Module):
    """A norm whose gain is one more than its parameter, as in Gemma."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(GAIN.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weight)


def norm(kind: str) -> nn.Module:
    made = {
        "layer": lambda: nn.LayerNorm(8),
        "layer, no shift": lambda: nn.LayerNorm(8, bias=False),
        "layer, bare": lambda: nn.LayerNorm(8, elementwise_affine=False),
        "rms": lambda: nn.RMSNorm(8, eps=1e-6),
        "one more": OneMore,
    }[kind]().double()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(SHIFT if name == "bias" else GAIN)
    return made


@pytest.mark.parametrize("kind", ["layer", "layer, no shift", "layer, bare", "rms", "one more"])
def test_a_norm_is_read_off_its_call(kind: str) -> None:
    module = norm(kind)
    with torch.no_grad():
        given = module(X)
    chain = frozen_norm(NormCall(module, X, given), F64)
    assert chain is not None
    (part,) = chain.parts
    assert isinstance(part, FrozenNorm)
    assert part.centred == kind.startswith("layer")
    power = X.var(-1, keepdim=True, unbiased=False) + 1e-5 if part.centred else X.square().mean(-1, keepdim=True) + 1e-6
    torch.testing.assert_close(part.scale, power.rsqrt(), rtol=1e-12, atol=0)
    gain = {"layer, bare": None, "one more": GAIN + 1}.get(kind, GAIN)
    assert part.gain is gain if gain is None else torch.allclose(part.gain, gain, rtol=1e-14, atol=0)
    if kind == "layer":
        torch.testing.assert_close(chain.offset(), SHIFT.expand(2, 5, 8), rtol=0, atol=1e-13)
    else:
        assert chain.offset() is None
    whole = chain.linear(X) + (0.0 if chain.offset() is None else chain.offset())
    torch.testing.assert_close(whole, given, rtol=0, atol=1e-13)


def test_what_is_no_norm_is_said() -> None:
    module = norm("layer")
    assert frozen_norm(NormCall(module, X, X.clone()), F64) is IDENTITY
    assert frozen_norm(NormCall(module, X, X.tanh()), F64) is None


def test_a_token_of_zeros_has_scale_zero() -> None:
    x = X.clone()
    x[1, 2] = 0.0
    module = norm("rms")
    with torch.no_grad():
        chain = frozen_norm(NormCall(module, x, module(x)), F64)
    assert chain is not None
    assert float(chain.parts[0].scale[1, 2]) == 0.0


def test_a_chain_acts_in_its_order() -> None:
    scale = numbers(2, 5, 1, seed=4)
    first, then = FrozenNorm(True, scale, GAIN, SHIFT), Gain(SHIFT)
    chain = Chain((first,)).then(Chain((then, Gain(-2.0))))
    centred = X - X.mean(-1, keepdim=True)
    torch.testing.assert_close(chain.linear(X), -2 * SHIFT * GAIN * scale * centred, rtol=1e-13, atol=1e-15)
    offset = chain.offset()
    assert offset is not None
    torch.testing.assert_close(offset, -2 * SHIFT * SHIFT, rtol=1e-15, atol=0)
    back = chain.then(Chain((FrozenNorm(False, scale, None, SHIFT),))).offset()
    torch.testing.assert_close(back, -2 * SHIFT * SHIFT * scale + SHIFT, rtol=1e-14, atol=1e-15)
    assert IDENTITY.is_identity
    assert not chain.is_identity
    assert IDENTITY.offset() is None


def test_how_one_stream_came_from_another() -> None:
    module = norm("layer")
    with torch.no_grad():
        given = module(2.0 * X)
    call = NormCall(module, 2.0 * X, given)
    found = {
        "itself": explain(X, X.clone(), [], F64),
        "scaled": explain(X, -0.25 * X, [], F64),
        "by channel": explain(X, GAIN * X, [], F64),
        "through a norm": explain(X, SHIFT * given, [call], F64),
    }
    assert found["itself"] is IDENTITY
    (one,) = found["scaled"].parts
    assert one.factor == pytest.approx(-0.25, rel=1e-14)
    (each,) = found["by channel"].parts
    torch.testing.assert_close(each.factor, GAIN, rtol=1e-12, atol=0)
    through = found["through a norm"]
    assert [type(part) for part in through.parts] == [Gain, FrozenNorm, Gain]
    torch.testing.assert_close(through.linear(X) + through.offset(), SHIFT * given, rtol=0, atol=1e-12)
    assert explain(X, X.tanh(), [call], F64) is None
    assert explain(X, X[:1], [], F64) is None
    assert explain(X.tanh(), given, [call], F64) is None
    assert explain(X[:1, :1], 2 * X[:1, :1], [], F64) is None, "one token alone tells no gain"
    assert explain(torch.zeros(1, 2, 8), numbers(1, 2, 8), [], F64) is None
    nudged = X * (1 + 1e-13)
    assert explain(X, nudged, [], F64, exact=False) is IDENTITY
    assert explain(X, nudged, [], F64) is not IDENTITY


def test_what_counts_as_equal() -> None:
    assert tolerance(F64) == 2.0**-37
    assert tolerance(torch.float32) == pytest.approx(2.0 ** (2 - 0.75 * 23), rel=1e-15)
    assert departure(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])) == 0.75
    assert departure(torch.zeros(3), torch.zeros(3)) == 0.0
