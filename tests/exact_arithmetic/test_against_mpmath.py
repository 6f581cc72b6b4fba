"""Whole blocks in exact arithmetic against hundreds and thousands of digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath as mp
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.exact_arithmetic.tensor import Deviation
from tests.reference import mp_transformer as reference

TOKENS, DIM, HEADS, HIDDEN = 5, 8, 2, 12
Weights = dict[str, Tensor]

MASKS: dict[str, Callable[[int, int], bool]] = {
    "complete": lambda query, key: True,
    "causal": lambda query, key: key <= query,
    "window": lambda query, key: abs(query - key) <= 1,
}


def weights(kind: str, norm: str, scale: float, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, by: float) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator) * by

    w = {f"{name}.weight": normal(DIM, DIM, by=scale / DIM**0.5) for name in "qkvo"}
    w |= {f"{name}.bias": normal(DIM, by=0.3) for name in "qkvo"}
    w |= {"up.weight": normal(HIDDEN, DIM, by=DIM**-0.5), "down.weight": normal(DIM, HIDDEN, by=HIDDEN**-0.5)}
    if kind == "gelu":
        w |= {"up.bias": normal(HIDDEN, by=0.3), "down.bias": normal(DIM, by=0.3)}
    else:
        w |= {"gate.weight": normal(HIDDEN, DIM, by=DIM**-0.5)}
    for name in ("norm1", "norm2"):
        w[f"{name}.weight"] = 1 + normal(DIM, by=0.2)
        if norm == "layer":
            w[f"{name}.bias"] = normal(DIM, by=0.2)
    return w


def block(x: Tensor, w: Weights, kind: str, norm: str, gain: float, mask: Tensor | None, fused: bool) -> Tensor:
    """The block of the reference as torch users write it."""

    def normed(t: Tensor, name: str) -> Tensor:
        if norm == "layer":
            return F.layer_norm(t, (DIM,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)
        return t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) * w[f"{name}.weight"]

    def heads(t: Tensor) -> Tensor:
        return t.view(1, TOKENS, HEADS, -1).transpose(1, 2)

    inner = normed(x, "norm1")
    q, k, v = (heads(F.linear(inner, w[f"{name}.weight"], w[f"{name}.bias"])) for name in "qkv")
    if fused:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    else:
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        out = scores.softmax(dim=-1) @ v
    branch = F.linear(out.transpose(1, 2).reshape(1, TOKENS, DIM), w["o.weight"], w["o.bias"])
    x = branch if gain == 0 else gain * x + branch
    inner = normed(x, "norm2")
    if kind == "gelu":
        hidden = F.gelu(F.linear(inner, w["up.weight"], w["up.bias"]))
        branch = F.linear(hidden, w["down.weight"], w["down.bias"])
    else:
        hidden = F.silu(F.linear(inner, w["gate.weight"])) * F.linear(inner, w["up.weight"])
        branch = F.linear(hidden, w["down.weight"])
    return branch if gain == 0 else gain * x + branch


def compare(kind: str, norm: str, gain: float, mask: str, *, depth: int, digits: int, scale: float, fused: bool) -> Any:
    """Run both and hold every layer to ten digits of the residual; gives back the last log10."""
    layers = [weights(kind, norm, scale, seed) for seed in range(depth)]
    start = torch.randn(1, TOKENS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    visible = torch.tensor([[MASKS[mask](i, j) for j in range(TOKENS)] for i in range(TOKENS)])
    x = Deviation.from_tokens(start)
    with mp.workdps(digits):
        rows = reference.numbers(start[0].tolist())
        for w in layers:
            x = block(x.recentred(), w, kind, norm, gain, None if mask == "complete" else visible, fused)
            exactly = {name: reference.numbers(value.tolist()) for name, value in w.items()}
            rows = reference.block(rows, exactly, heads=HEADS, kind=kind, norm=norm, gain=gain, allowed=MASKS[mask])
            expected = reference.log_residual(rows)
            assert abs(mp.expm1(mp.mpf(x.log_residual()) - expected)) <= 1e-10
            last = expected / mp.log(10)
    return last


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("gain", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("kind", "norm"), [("gelu", "layer"), ("swiglu", "rms")])
def test_every_layer_to_ten_digits(kind: str, norm: str, gain: float, mask: str) -> None:
    depth = 7 if gain == 0.0 and mask == "complete" else 8
    last = compare(kind, norm, gain, mask, depth=depth, digits=400, scale=1.0, fused=True)
    if gain == 0.0 and mask == "complete":
        assert last < -100


@pytest.mark.parametrize("gain", [0.0, 0.5])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_spelled_out(mask: str, gain: float) -> None:
    compare("gelu", "layer", gain, mask, depth=4, digits=400, scale=1.0, fused=False)


@pytest.mark.slow
def test_down_to_two_thousand_digits() -> None:
    last = compare("swiglu", "rms", 0.0, "complete", depth=8, digits=2300, scale=0.58, fused=True)
    assert last < -2000
