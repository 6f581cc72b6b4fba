"""Transients: exact powers in many digits, lower and upper bounds around them, and their length for causal windows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rankscope._errors import InputError
from rankscope.theory.transient import (
    kreiss_lower_bound,
    numerical_radius_bound,
    predicted_decay,
    simulated_residuals,
    transient,
)
from tests.reference import spectral as reference
from tests.theory.test_spectral_law import both_ways, causal, uniform


@pytest.mark.parametrize(("n", "window", "power"), [(12, 3, 40), (32, 3, 80)])
def test_powers_against_many_digits(n: int, window: int, power: int) -> None:
    P = uniform(causal(n, window))
    frobenius = float(simulated_residuals(P, torch.eye(n), power)[-1])
    assert frobenius == pytest.approx(reference.log_norm_of_power(causal(n, window), power, 120), abs=1e-11)
    spectral = float(predicted_decay(P, power)[-1])
    assert frobenius - 0.5 * math.log(n) <= spectral <= frobenius


def test_subtracting_the_mean_would_not_do() -> None:
    """A transient longer than float64 is precise: the same powers centred at each step stay above, by a factor e^20."""
    n, power = 64, 300
    P = reference.uniform_over(causal(n, 3))
    Y, log_scale = np.eye(n), 0.0
    for _ in range(power):
        Y = P @ Y
        Y -= Y.mean(0)
        log_scale, Y = log_scale + math.log(np.linalg.norm(Y)), Y / np.linalg.norm(Y)
    assert log_scale > float(simulated_residuals(torch.from_numpy(P), torch.eye(n), power)[-1]) + 20


@pytest.mark.parametrize(("n", "window"), [(32, 4), (64, 4), (64, 8), (48, 3)])
def test_length_for_causal_windows_is_the_time_to_cross(n: int, window: int) -> None:
    """A layer moves what is known of the first tokens by (w-1)/2 on average: n tokens take 2n/(w-1) layers."""
    crossing = 2 * n / (window - 1)
    found = transient(uniform(causal(n, window)), 6 * n)
    assert found.settled
    assert crossing <= found.length <= 1.35 * crossing
    assert math.exp(float(found.log_norms[int(crossing / 4)] - found.log_norms[int(crossing / 4) - 1])) > 0.9


def test_causal_settles_at_once_and_a_symmetric_window_has_none() -> None:
    assert transient(uniform(causal(32)), 100).length <= 6
    assert transient(uniform(both_ways(32, 3)), 100).length <= 1


@pytest.mark.parametrize(
    "mask", [causal(16), causal(16, 4), both_ways(16, 2)], ids=["causal", "causal window", "window"]
)
def test_bounds_lie_around_the_powers(mask: np.ndarray) -> None:
    P = uniform(mask)
    found = transient(P, 120)
    assert 0 <= found.log_delay_lower_bound <= max(found.log_delay, 0.0) + 1e-9
    w = numerical_radius_bound(P)
    steps = torch.arange(1, 121, dtype=torch.float64)
    assert bool((found.log_norms <= math.log(2) + steps * math.log(w) + 1e-12).all())


def test_kreiss_bound_sees_the_delay_of_a_window() -> None:
    found = transient(uniform(causal(32, 4)), 200)
    assert found.log_delay_lower_bound > 0.9 * found.log_delay > 10


def test_numerical_radius_of_a_jordan_block() -> None:
    """Anchored at token 0, tokens 1 and 2 map by [[0,0],[1,0]] up to centring; w lies between s_1/2 and s_1 of CP0."""
    P = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0]], dtype=torch.float64)
    largest = float(torch.linalg.matrix_norm(P - P.mean(0), 2))
    assert largest / 2 <= numerical_radius_bound(P) <= largest * 1.0004


def test_powers_of_a_nilpotent_mask_end() -> None:
    P = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0]], dtype=torch.float64)
    assert predicted_decay(P, 3)[1:].tolist() == [-math.inf, -math.inf]
    found = transient(P, 3)
    assert found.log_late_factor == -math.inf
    assert math.isnan(found.log_delay)


def test_kreiss_is_zero_at_least_and_layers_are_counted_from_one() -> None:
    assert kreiss_lower_bound(uniform(both_ways(8, 1)), 0.99) >= 0
    with pytest.raises(InputError, match="at least one"):
        predicted_decay(uniform(causal(4)), 0)
