"""The spectral law: second eigenvalues in closed form, networks run step by step, and every way to compute them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse
import torch

from rankscope._errors import InputError
from rankscope.theory.sparse_spectrum import sparse_second_mode
from rankscope.theory.spectral_law import second_mode, spectral_factor
from tests.reference import spectral as reference


def causal(n: int, window: int | None = None) -> np.ndarray:
    i = np.arange(n)
    return (i[:, None] >= i) & (i[:, None] - i < (window or n))


def both_ways(n: int, reach: int) -> np.ndarray:
    i = np.arange(n)
    return np.abs(i[:, None] - i) <= reach


def uniform(mask: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(reference.uniform_over(mask))


def check_vectors(P: torch.Tensor, digits: float) -> None:
    mode = second_mode(P)
    wide = P.to(torch.complex128)
    moved = wide @ mode.right
    assert float((moved - moved.mean() - mode.eigenvalue * mode.right).abs().max()) < digits
    assert float((mode.left @ wide - mode.eigenvalue * mode.left).abs().max()) < digits
    assert float(mode.right.norm()) == pytest.approx(1)
    assert float(mode.left.norm()) == pytest.approx(1)


@pytest.mark.parametrize("n", [2, 3, 8, 512])
def test_causal_is_exactly_one_half(n: int) -> None:
    """Eigenvalues 1, 1/2, 1/3, ...; right pattern 0, 1, 2, ... less its mean, left (-1, 1, 0, ...)."""
    mode = second_mode(uniform(causal(n)))
    assert mode.eigenvalue == 0.5
    pattern = torch.arange(n, dtype=torch.float64) - (n - 1) / 2
    torch.testing.assert_close(mode.right.real.abs(), (pattern / pattern.norm()).abs(), rtol=0, atol=1e-13)
    assert mode.left.real[:2].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert not bool(mode.left[2:].any())
    upper = second_mode(uniform(causal(n)).flip(0, 1))
    assert (upper.eigenvalue, upper.method) == (0.5, "triangular")


@pytest.mark.parametrize(
    ("mask", "want", "within"),
    [(causal(32), 0.5, 1e-8), (both_ways(32, 3), 0.97864, 1e-4), (both_ways(32, 1), 0.99665, 5e-3)],
    ids=["causal", "window 3", "window 1"],
)
def test_late_factor_of_a_network_is_the_second_eigenvalue(mask: np.ndarray, want: float, within: float) -> None:
    logs = reference.network_log_residuals(mask, dim=16, layers=60, seed=3)
    predicted = spectral_factor(uniform(mask))
    assert predicted == pytest.approx(want, abs=5e-6)
    assert math.exp((logs[-1] - logs[-11]) / 10) == pytest.approx(predicted, abs=within)


def test_ring_window_has_its_dirichlet_eigenvalue() -> None:
    """Neighbours within 2 on a ring of n: (1 + 2cos a + 2cos 2a)/5 with a = 2 pi/n."""
    n, a = 15, 2 * math.pi / 15
    distance = (np.arange(n)[:, None] - np.arange(n)) % n
    ring = np.minimum(distance, n - distance) <= 2
    mode = second_mode(uniform(ring))
    assert mode.method == "reversible"
    assert mode.eigenvalue.real == pytest.approx((1 + 2 * math.cos(a) + 2 * math.cos(2 * a)) / 5, rel=1e-13)


def test_complex_pair_of_a_one_way_ring() -> None:
    """Half stay, half move on: eigenvalues (1 + e^{2 pi i k/n})/2, of modulus cos(pi/n)."""
    n = 7
    P = (torch.eye(n) + torch.eye(n).roll(1, 1)).double() / 2
    mode = second_mode(P)
    assert mode.method == "dense"
    assert mode.factor == pytest.approx(math.cos(math.pi / n), rel=1e-13)
    check_vectors(P, 1e-13)


@pytest.mark.parametrize(
    "mask",
    [causal(9), causal(9, 3), both_ways(9, 2), causal(9) | both_ways(9, 1), causal(9).T.copy()],
    ids=["causal", "causal window", "window", "mixed", "anticausal"],
)
def test_vectors_satisfy_their_equations(mask: np.ndarray) -> None:
    check_vectors(uniform(mask), 1e-12)


def test_two_fixed_tokens_never_collapse() -> None:
    P = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [1 / 4, 1 / 4, 1 / 2]], dtype=torch.float64)
    assert second_mode(P).factor == 1.0
    check_vectors(P, 1e-14)


def test_equal_rows_leave_nothing() -> None:
    row = torch.softmax(torch.randn(6, dtype=torch.float64), 0)
    mode = second_mode(row.expand(6, 6))
    assert (mode.factor, mode.method) == (0.0, "equal rows")


def test_random_attention_against_all_eigenvalues() -> None:
    for _ in range(20):
        P = torch.softmax(3 * torch.randn(12, 12, dtype=torch.float64), -1)
        moduli = np.sort(np.abs(np.linalg.eigvals(P.numpy())))[::-1]
        assert second_mode(P).factor == pytest.approx(moduli[1], rel=1e-10)


def test_sparse_matrices_give_the_same() -> None:
    scattered = (np.random.default_rng(0).random((100, 100)) < 0.05) | np.eye(100, dtype=bool)
    for mask, method in ((causal(40, 5), "triangular"), (scattered, "arnoldi")):
        sparse = scipy.sparse.csr_array(reference.uniform_over(mask))
        dense = second_mode(uniform(mask))
        assert second_mode(sparse).eigenvalue == dense.eigenvalue
        eigenvalue, right, left, found = sparse_second_mode(sparse)
        assert found == method
        assert abs(eigenvalue) == pytest.approx(dense.factor, rel=1e-11)
        moved = torch.from_numpy(sparse @ right.numpy())
        assert float((moved - moved.mean() - eigenvalue * right).abs().max()) < 1e-10
        assert float((torch.from_numpy(sparse.T @ left.numpy()) - eigenvalue * left).abs().max()) < 1e-10


def test_condition_says_how_far_two_methods_may_differ() -> None:
    """Causal window plus the next token: each method solves a matrix off by a few eps, and the condition is 1e7."""
    mask = causal(40, 5) | both_ways(40, 1)
    dense = second_mode(uniform(mask))
    other = sparse_second_mode(scipy.sparse.csr_array(reference.uniform_over(mask)))[0]
    assert dense.condition > 1e6
    assert 1e-12 < abs(other - dense.eigenvalue) < 1e-14 * dense.condition


def test_large_sparse_causal_window() -> None:
    n, w = 5000, 4
    window = scipy.sparse.csr_array(scipy.sparse.diags([np.ones(n - k) for k in range(w)], [-k for k in range(w)]))
    counts = np.asarray(window.sum(axis=1)).ravel()
    mode = second_mode(scipy.sparse.csr_array(scipy.sparse.diags([1 / counts], [0])) @ window)
    assert (mode.eigenvalue, mode.method) == (0.5, "triangular")


def test_growth_of_values_multiplies() -> None:
    W = torch.tensor([[0.0, 2.0], [-2.0, 0.0]])
    assert spectral_factor(uniform(causal(5)), W) == pytest.approx(1.0, rel=1e-13)


@pytest.mark.parametrize(
    "P", [torch.ones(2, 3) / 3, torch.ones(2, 2), torch.tensor([[2.0, -1.0], [0.0, 1.0]]), torch.full((2, 2), math.nan)]
)
def test_what_is_not_stochastic_is_refused(P: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"square|row-stochastic"):
        second_mode(P)
