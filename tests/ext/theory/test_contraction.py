"""Gains of a layer against the dense matrix that the library never forms."""

from __future__ import annotations

import math

import pytest
import torch

from rankscope.errors import InputError
from rankscope.ext.theory.contraction import layer_gains
from rankscope.linalg.scaled import centred


def rand(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def layer(seed: int, n: int, dim: int, heads: int, width: int, sharp: float = 1.0):
    generator = torch.Generator().manual_seed(seed)
    P = torch.softmax(sharp * rand(generator, heads, n, n), -1)
    return rand(generator, n, dim), P, rand(generator, heads, dim, width), rand(generator, heads, width, dim)


def dense_gains(P: torch.Tensor, W_V: torch.Tensor, W_O: torch.Tensor, skip: float = 0.0) -> torch.Tensor:
    """All singular values on centred residuals, from the Kronecker sum on an orthonormal basis of centred columns."""
    n, dim = P.shape[-1], W_V.shape[1]
    C = torch.eye(n, dtype=torch.float64) - 1 / n
    basis = torch.linalg.svd(C).U[:, : n - 1]
    T = sum(torch.kron(basis.T @ P[h] @ basis, (W_V[h] @ W_O[h]).T.contiguous()) for h in range(P.shape[0]))
    return torch.linalg.svdvals(T + skip * torch.eye((n - 1) * dim, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("skip", [0.0, 1.0, -0.5])
def test_the_certified_interval_holds_every_gain(seed: int, skip: float) -> None:
    heads, width = 1 + seed % 3, 1 + seed % 4
    R, P, W_V, W_O = layer(seed, 5, 4, heads, width)
    gains = layer_gains(R, P, W_V, W_O, skip_gain=skip)
    values = dense_gains(P, W_V, W_O, skip)
    assert gains.any_residual.lower <= float(values[-1]) * (1 + 1e-9) + 1e-13
    assert float(values[0]) <= gains.any_residual.upper
    assert gains.measured in gains.given_values


def test_the_interval_given_values_holds_every_orientation_of_them() -> None:
    """Turning the tokens among themselves keeps the singular values of the values, and so the interval."""
    R, P, W_V, W_O = layer(3, 6, 4, 2, 2)
    interval = layer_gains(R, P, W_V, W_O).given_values
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.svd(torch.eye(6, dtype=torch.float64) - 1 / 6).U[:, :5]
    found = []
    for _ in range(300):
        turned = basis @ torch.linalg.qr(rand(generator, 5, 5)).Q @ basis.T @ centred(R)
        gains = layer_gains(turned, P, W_V, W_O)
        assert gains.given_values.upper == pytest.approx(interval.upper, rel=1e-9)
        found.append(gains.measured)
    assert interval.lower <= min(found)
    assert max(found) <= interval.upper


def test_more_heads_than_the_width_can_hold_leave_no_lower_end_and_shared_values_none_either() -> None:
    R, P, W_V, W_O = layer(1, 5, 6, 2, 2)
    gains = layer_gains(R, P, W_V, W_O)
    assert gains.any_residual.lower == 0.0
    assert gains.given_values.lower > 0
    assert float(dense_gains(P, W_V, W_O)[-1]) < 1e-12


def test_one_head_of_full_width_has_an_exact_interval() -> None:
    R, P, W_V, _ = layer(2, 5, 3, 1, 3)
    gains = layer_gains(R, P, W_V, torch.eye(3, dtype=torch.float64)[None])
    values = dense_gains(P, W_V, torch.eye(3, dtype=torch.float64)[None])
    assert gains.any_residual.upper == pytest.approx(float(values[0]), rel=1e-9)
    assert gains.any_residual.lower == pytest.approx(float(values[-1]), rel=1e-9)


def test_ends_are_widened_by_sixteen_times_the_larger_side_in_units_of_rounding() -> None:
    """A permutation and the identity: every gain is 1, so that an end is 1 and the widening it was given."""
    n, dim = 7, 6
    eye = torch.eye(dim, dtype=torch.float64)[None]
    R = torch.linalg.svd(torch.eye(n, dtype=torch.float64) - 1 / n).U[:, :dim]
    gains = layer_gains(R, torch.eye(n, dtype=torch.float64).roll(1, 0)[None], eye, eye)
    eps = torch.finfo(torch.float64).eps
    attention, values, weights = 16 * n, 16 * n, 16 * dim
    ends = {
        "any lower": ((1 - gains.any_residual.lower) / eps, attention + 2 * weights),
        "any upper": ((gains.any_residual.upper - 1) / eps, attention + weights),
        "given lower": ((1 - gains.given_values.lower) / eps, attention + values + weights),
        "given upper": ((gains.given_values.upper - 1) / eps, attention + values + weights + 16),
    }
    # LAPACK itself is off by a few units
    assert {name: got for name, (got, want) in ends.items() if abs(got - want) > 24} == {}


def test_rows_that_do_not_add_up_to_one_are_refused() -> None:
    R, P, W_V, W_O = layer(0, 4, 3, 1, 2)
    with pytest.raises(InputError, match="adds up to 1 only within"):
        layer_gains(R, 0.8 * P, W_V, W_O)


def test_equal_tokens_have_no_contraction() -> None:
    _, P, W_V, W_O = layer(0, 4, 3, 1, 2)
    assert math.isnan(layer_gains(torch.ones(4, 3).double(), P, W_V, W_O).measured)
