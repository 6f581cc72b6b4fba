"""The spectral law: second eigenvalues in closed form, networks run step by step, and the transient before the law."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.sparse import csr_array

from rankscope.ext.theory.graphs.bracket import Bracket
from rankscope.ext.theory.graphs.connectivity import connectivity
from rankscope.ext.theory.graphs.mixing import Decay, followed, transient_layers
from rankscope.ext.theory.graphs.second_eigenvalue import SecondEigenvalue, second_eigenvalue
from tests.reference import spectral as reference


def causal(n: int, window: int | None = None) -> np.ndarray:
    i = np.arange(n)
    return (i[:, None] >= i) & (i[:, None] - i < (window or n))


def both_ways(n: int, reach: int) -> np.ndarray:
    i = np.arange(n)
    return np.abs(i[:, None] - i) <= reach


def second(mask: np.ndarray) -> SecondEigenvalue:
    sees = csr_array(mask)
    return second_eigenvalue(sees, connectivity(sees))


def powers(mask: np.ndarray, layers: int, late_factor: float) -> Decay:
    """log ||C P0^t||_F for t = 0 to ``layers``: what is left of the identity; the first token sees only itself."""
    P = reference.uniform_over(mask)
    anchor = 0 if P[0, 0] == 1 else None
    return followed(lambda Y: P @ Y, np.eye(len(mask)), anchor, late_factor, layers)


@pytest.mark.parametrize("n", [2, 3, 8, 512, 5000])
def test_causal_is_exactly_one_half(n: int) -> None:
    """Eigenvalues 1, 1/2, 1/3, ..., and the same counted from the other end."""
    one_half = Bracket.exactly(0.5, "exact: read from the diagonal")
    assert second(causal(n)).modulus == one_half
    assert second(causal(n)[::-1, ::-1]).modulus == one_half


@pytest.mark.parametrize(
    ("mask", "want", "within"),
    [(causal(32), 0.5, 1e-8), (both_ways(32, 3), 0.97864, 1e-4), (both_ways(32, 1), 0.99665, 5e-3)],
    ids=["causal", "window 3", "window 1"],
)
def test_late_factor_of_a_network_is_the_second_eigenvalue(mask: np.ndarray, want: float, within: float) -> None:
    logs = reference.network_log_residuals(mask, dim=16, layers=60, seed=3)
    predicted = second(mask).modulus
    assert predicted.lower == predicted.upper == pytest.approx(want, abs=5e-6)
    assert math.exp((logs[-1] - logs[-11]) / 10) == pytest.approx(predicted.lower, abs=within)


def test_ring_window_has_its_dirichlet_eigenvalue() -> None:
    """Neighbours within 2 on a ring of n: (1 + 2cos a + 2cos 2a)/5 with a = 2 pi/n."""
    n, a = 15, 2 * math.pi / 15
    distance = (np.arange(n)[:, None] - np.arange(n)) % n
    ring = np.minimum(distance, n - distance) <= 2
    assert second(ring).modulus.lower == pytest.approx((1 + 2 * math.cos(a) + 2 * math.cos(2 * a)) / 5, rel=1e-13)


def test_complex_pair_of_a_one_way_ring() -> None:
    """Half stay, half move on: eigenvalues (1 + e^{2 pi i k/n})/2, of modulus cos(pi/n)."""
    n = 7
    ring = np.eye(n, dtype=bool) | np.roll(np.eye(n, dtype=bool), 1, axis=1)
    assert second(ring).modulus.lower == pytest.approx(math.cos(math.pi / n), rel=1e-13)


def test_two_fixed_tokens_never_collapse() -> None:
    assert second(np.array([[1, 0, 0], [0, 1, 0], [1, 1, 1]], dtype=bool)).gap == 0.0


@pytest.mark.parametrize(("n", "window", "power"), [(12, 3, 40), (32, 3, 80)])
def test_powers_against_many_digits(n: int, window: int, power: int) -> None:
    found = powers(causal(n, window), power, late_factor=1e-9)
    assert len(found.log_residuals) == power + 1
    assert found.log_residuals[-1] == pytest.approx(
        reference.log_norm_of_power(causal(n, window), power, 120), abs=1e-11
    )


@pytest.mark.parametrize(("n", "window"), [(32, 4), (64, 4), (64, 8), (48, 3)])
def test_length_for_causal_windows_is_the_time_to_cross(n: int, window: int) -> None:
    """A layer moves what is known of the first tokens by (w-1)/2 on average: n tokens take 2n/(w-1) layers."""
    crossing = 2 * n / (window - 1)
    mask = causal(n, window)
    found = powers(mask, 6 * n, late_factor=0.5)
    length = transient_layers(found, second(mask))
    assert crossing <= length.lower == length.upper <= 1.35 * crossing
    quarter = int(crossing / 4)
    assert math.exp(found.log_residuals[quarter + 1] - found.log_residuals[quarter]) > 0.9


def test_causal_settles_at_once_and_a_symmetric_window_has_none() -> None:
    assert transient_layers(powers(causal(32), 100, 0.5), second(causal(32))).upper <= 6
    window = both_ways(32, 3)
    late = second(window)
    assert transient_layers(powers(window, 100, late.modulus.lower), late).upper <= 1
