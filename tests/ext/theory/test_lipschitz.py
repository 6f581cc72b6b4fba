"""Certified constants against difference quotients, and where a lower bound would pass for one."""

from __future__ import annotations

import mpmath
import pytest
import torch

from rankscope.errors import InputError
from rankscope.ext.theory.lipschitz import SLOPES, gated_constants, mlp_constants
from rankscope.ext.theory.operator_norms import composite_norm, spectral_bound

FUNCTIONS = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "gelu_new": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": torch.nn.functional.silu,
}


def rand(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_slope_is_larger_than_said_and_none_is_said_much_too_large(name: str) -> None:
    x = torch.linspace(-12, 12, 2_000_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(FUNCTIONS[name](x).sum(), x)
    assert float(slope.abs().max()) <= SLOPES[name] <= float(slope.abs().max()) * (1 + 1e-7)


def test_the_slope_of_gelu_is_that_at_root_two() -> None:
    with mpmath.workdps(30):
        slope = mpmath.diff(lambda x: x * mpmath.ncdf(x), mpmath.sqrt(2))
    assert float(slope) <= SLOPES["gelu"] <= float(slope) + 1e-8


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_pair_of_inputs_is_torn_apart_by_more(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        W_in, W_out = rand(generator, 4, 9), rand(generator, 9, 4)
        found = mlp_constants(W_in, W_out, name)
        X, x = rand(generator, 6, 4), rand(generator, 1, 4)
        torn = FUNCTIONS[name](X @ W_in) @ W_out - FUNCTIONS[name](x @ W_in) @ W_out
        assert float(composite_norm(torn)) <= found.composite * float(composite_norm(X - x))


def test_a_gated_mlp_on_a_ball() -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(100):
        gate, up, down = rand(generator, 4, 7), rand(generator, 4, 7), rand(generator, 7, 4)
        radius = float(torch.rand(1, generator=generator)) * 3
        found = gated_constants(gate, up, down, "silu", radius)
        X = rand(generator, 6, 4)
        X = (
            X
            / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
            * radius
            * torch.rand(6, 1, generator=generator).double()
        )
        out = (torch.nn.functional.silu(X @ gate) * (X @ up)) @ down
        torn, apart = out - out[:1], X - X[:1]
        assert float(composite_norm(torn)) <= found.composite * float(composite_norm(apart)) * (1 + 1e-12)


def test_a_few_steps_of_power_iteration_would_be_too_small() -> None:
    generator = torch.Generator().manual_seed(3)
    A = rand(generator, 60, 60)
    v = rand(generator, 60)
    for _ in range(3):
        v = A.T @ (A @ v)
        v = v / torch.linalg.vector_norm(v)
    true = float(torch.linalg.matrix_norm(A, 2))
    assert float(torch.linalg.vector_norm(A @ v)) < true <= spectral_bound(A) <= true * (1 + 1e-12)


def test_an_activation_that_is_not_known_is_refused() -> None:
    eye = torch.eye(2)
    with pytest.raises(InputError, match="'sine' is not known"):
        mlp_constants(eye, eye, "sine")
