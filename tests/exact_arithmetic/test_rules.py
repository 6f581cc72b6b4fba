"""Each rule against high precision, at scales from one to far below anything a float can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath as mp
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.exact_arithmetic.terms import Term
from tests.exact_arithmetic.precision import entrywise, error, in_digits, scales, seeds, tokens
from tests.reference import mp_transformer as reference

Function = Callable[[Any], Any]


def heaviside(x: Any) -> Any:
    return x if x > 0 else mp.mpf(0)


SMOOTH: dict[str, tuple[Function, Function]] = {
    "gelu": (F.gelu, reference.gelu),
    "gelu, tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: x / 2 * (1 + mp.tanh(mp.sqrt(2 / mp.pi) * (x + mp.mpf(0.044715) * x**3))),
    ),
    "gelu, spelled out": (
        lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: x / 2 * (1 + mp.tanh(mp.mpf(0.7978845608028654) * (x + mp.mpf(0.044715) * x**3))),
    ),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), lambda x: x * reference.sigmoid(mp.mpf(1.702) * x)),
    "silu": (F.silu, reference.silu),
    "sigmoid": (torch.sigmoid, reference.sigmoid),
    "tanh": (torch.tanh, mp.tanh),
    "erf": (torch.erf, mp.erf),
    "softplus": (F.softplus, lambda x: mp.log1p(mp.exp(x))),
    "log sigmoid": (F.logsigmoid, lambda x: -mp.log1p(mp.exp(-x))),
    "mish": (F.mish, lambda x: x * mp.tanh(mp.log1p(mp.exp(x)))),
    "exp": (torch.exp, mp.exp),
    "expm1": (torch.expm1, mp.expm1),
    "sin": (torch.sin, mp.sin),
    "cos": (torch.cos, mp.cos),
    "cube": (lambda x: x**3, lambda x: x**3),
    "negative": (torch.neg, lambda x: -x),
}

KINKED: dict[str, tuple[Function, Function]] = {
    "relu": (F.relu, heaviside),
    "squared relu": (lambda x: F.relu(x).square(), lambda x: heaviside(x) ** 2),
    "leaky relu": (lambda x: F.leaky_relu(x, 0.25), lambda x: x if x > 0 else x / 4),
    "elu": (F.elu, lambda x: x if x > 0 else mp.expm1(x)),
    "hard swish": (F.hardswish, lambda x: x * min(max(x + 3, mp.mpf(0)), mp.mpf(6)) / 6),
    "clamp": (lambda x: x.clamp(-0.5, 0.75), lambda x: min(max(x, mp.mpf(-0.5)), mp.mpf(0.75))),
    "absolute": (torch.abs, abs),
    "maximum": (lambda x: torch.maximum(x, torch.tensor(0.25).double()), lambda x: max(x, mp.mpf(0.25))),
    "where": (lambda x: torch.where(x > 0, 2 * x, 0.5 * x), lambda x: 2 * x if x > 0 else x / 2),
}

POSITIVE: dict[str, tuple[Function, Function]] = {
    "log": (torch.log, mp.log),
    "sqrt": (torch.sqrt, mp.sqrt),
    "rsqrt": (torch.rsqrt, lambda x: 1 / mp.sqrt(x)),
    "reciprocal": (lambda x: 1 / x, lambda x: 1 / x),
    "power": (lambda x: x**0.3, lambda x: x ** mp.mpf(0.3)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SMOOTH)
@given(seed=seeds, log_scale=scales)
def test_smooth_functions(name: str, seed: int, log_scale: float) -> None:
    function, exactly = SMOOTH[name]
    x = tokens(seed, log_scale)
    with mp.workdps(760):
        assert error(function(x), entrywise(exactly)(in_digits(x)), x) <= 1e-11


@pytest.mark.parametrize("name", KINKED)
@given(seed=seeds, log_scale=scales)
def test_functions_with_kinks(name: str, seed: int, log_scale: float) -> None:
    function, exactly = KINKED[name]
    x = tokens(seed, log_scale)
    with mp.workdps(760):
        assert error(function(x), entrywise(exactly)(in_digits(x)), x) <= 1e-11


@pytest.mark.parametrize("name", POSITIVE)
@given(seed=seeds, log_scale=scales.filter(lambda s: s < -2))
def test_functions_of_positive_numbers(name: str, seed: int, log_scale: float) -> None:
    function, exactly = POSITIVE[name]
    x = tokens(seed, log_scale, shift=1.0)
    with mp.workdps(760):
        assert error(function(x), entrywise(exactly)(in_digits(x)), x) <= 1e-12


def test_relu_exactly_on_its_kink() -> None:
    x = Deviation(torch.zeros(1, 2).double(), (Term(-5000.0, torch.tensor([[1.0, -1.0], [2.0, -3.0]]).double()),))
    assert F.relu(x).terms[0].values.tolist() == [[1.0, 0.0], [2.0, 0.0]]
    assert F.relu(x).terms[0].log_scale == -5000.0


@given(seed=seeds, log_scale=scales)
def test_norms(seed: int, log_scale: float) -> None:
    x = tokens(seed, log_scale)
    gain, shift = torch.linspace(0.5, 2.0, 6).double(), torch.linspace(-1.0, 1.0, 6).double()
    with mp.workdps(760):
        weight, bias = reference.numbers(gain.tolist()), reference.numbers(shift.tolist())
        out = F.layer_norm(x, (6,), gain, shift, 1e-5)
        assert error(out, reference.layer_norm(in_digits(x), weight, bias, 1e-5), x) <= 1e-12
        expected = reference.rms_norm(in_digits(x), weight, 1e-6)
        for norm in (F.rms_norm(x, (6,), gain, 1e-6), x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gain):
            assert error(norm, expected, x) <= 1e-12
        spelled = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
        one, zero = [mp.mpf(1)] * 6, [mp.mpf(0)] * 6
        assert error(spelled, reference.layer_norm(in_digits(x), one, zero, 1e-5), x) <= 1e-12


@given(seed=seeds, log_scale=scales)
def test_products_and_quotients(seed: int, log_scale: float) -> None:
    x = tokens(seed, log_scale)
    y = x.tanh() + 3.0
    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).double()
    with mp.workdps(760):
        rows = in_digits(x)
        other = [[mp.tanh(v) + 3 for v in row] for row in rows]
        pairs = list(zip(rows, other, strict=True))
        assert error(x * y, [[a * b for a, b in zip(p, q, strict=True)] for p, q in pairs], x) <= 1e-12
        assert error(x / y, [[a / b for a, b in zip(p, q, strict=True)] for p, q in pairs], x) <= 1e-12
        assert error(x - 2 * y, [[a - 2 * b for a, b in zip(p, q, strict=True)] for p, q in pairs], x) <= 1e-12
        expected = reference.linear(rows, reference.numbers(weight.tolist()))
        for out in (F.linear(x, weight), x @ weight.t(), torch.einsum("nd,od->no", x, weight)):
            assert error(out, expected, x) <= 1e-12


@pytest.mark.parametrize("name", ["aten._grouped_mm", "transformers.grouped_mm_fallback"])
@given(seed=seeds, log_scale=scales)
def test_products_with_the_weights_of_experts(name: str, seed: int, log_scale: float) -> None:
    import transformers.integrations.moe  # noqa: F401  (registers an operation of its own for torch without this one)

    library, _, operation = name.partition(".")
    product = getattr(getattr(torch.ops, library), operation, None)
    if product is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    x = tokens(seed, log_scale)
    weight = torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(seed)).double()
    with mp.workdps(760):
        sent_to = zip(in_digits(x), (0, 2, 2, 2), strict=True)  # the second expert gets none
        expected = [reference.linear([row], reference.numbers(weight[g].t().tolist()))[0] for row, g in sent_to]
        assert error(product(x, weight, offs=torch.tensor([1, 1, 4], dtype=torch.int32)), expected, x, 0) <= 1e-12
        together = product(x, weight, offs=torch.tensor([0, 4, 4], dtype=torch.int32))
        assert (together.base == together.base[:1]).all()
        expected = reference.linear(in_digits(x), reference.numbers(weight[1].t().tolist()))
        assert error(Deviation(together.base[:1], together.terms, together.shape), expected, x) <= 1e-12


@given(seed=seeds, log_scale=scales)
def test_softmax(seed: int, log_scale: float) -> None:
    x = tokens(seed, log_scale)

    def exactly(row: list[Any]) -> list[Any]:
        weights = [mp.exp(value) for value in row]
        return [w / mp.fsum(weights) for w in weights]

    with mp.workdps(760):
        assert error(x.softmax(-1), [exactly(row) for row in in_digits(x)], x) <= 1e-12


@pytest.mark.slow
@given(seed=seeds, log_scale=scales)
def test_position_free_attention_is_of_third_order(seed: int, log_scale: float) -> None:
    x = tokens(seed, log_scale, (1, 4, 6))
    q, k, v = (part.unsqueeze(1) for part in (x, x.flip(-1) * 0.5, x + x.tanh()))
    out = F.scaled_dot_product_attention(q, k, v).squeeze(1)
    spelled = ((q @ k.transpose(-1, -2) * 6**-0.5).softmax(-1) @ v).squeeze(1)
    with mp.workdps(2400):
        rows = in_digits(x)
        keys = [[value / 2 for value in reversed(row)] for row in rows]
        values = [[value + mp.tanh(value) for value in row] for row in rows]
        expected = []
        for row in rows:
            weights = [mp.exp(mp.fdot(row, key) / mp.sqrt(6)) for key in keys]
            expected.append([mp.fdot(weights, column) / mp.fsum(weights) for column in zip(*values, strict=True)])
        assert error(out, expected, x, order=3) <= 1e-10
        assert error(spelled, expected, x, order=3) <= 1e-10


ANGLES = torch.arange(4, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64)


def rotated(x: Tensor) -> Tensor:
    cos, sin = (torch.cat((part, part), -1) for part in (ANGLES.cos(), ANGLES.sin()))
    return x * cos + torch.cat((-x[..., 3:], x[..., :3]), -1) * sin


@given(seed=seeds, log_scale=scales)
def test_rotary_positions_leave_first_order(seed: int, log_scale: float) -> None:
    x = tokens(seed, log_scale, (1, 4, 6))
    inner = x.unsqueeze(1)
    out = F.scaled_dot_product_attention(rotated(inner), rotated(inner), inner, is_causal=True).squeeze(1)
    cosines, sines = ANGLES.cos().tolist(), ANGLES.sin().tolist()
    with mp.workdps(760):
        rows = in_digits(x)
        turned = [
            [a * c - b * s for a, b, c, s in zip(row[:3], row[3:], cos, sin, strict=True)]
            + [b * c + a * s for a, b, c, s in zip(row[:3], row[3:], cos, sin, strict=True)]
            for row, cos, sin in zip(rows, cosines, sines, strict=True)
        ]
        expected = []
        for i in range(4):
            weights = [mp.exp(mp.fdot(turned[i], turned[j]) / mp.sqrt(6)) for j in range(i + 1)]
            columns = zip(*rows[: i + 1], strict=True)
            expected.append([mp.fdot(weights, column) / mp.fsum(weights) for column in columns])
        assert error(out, expected, x) <= 1e-11
