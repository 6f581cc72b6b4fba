"""Every way to the slowest mode of a part, on parts small enough for the dense eigenvalues to be the judge."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.sparse import csr_array

from rankscope.ext.theory.graphs import second_eigenvalue as module
from rankscope.ext.theory.graphs.connectivity import connectivity
from rankscope.ext.theory.graphs.second_eigenvalue import (
    closed_part,
    open_part,
    second_eigenvalue,
)

TOKENS = 40


def uniform(sees: np.ndarray) -> np.ndarray:
    return sees / sees.sum(1, keepdims=True)


def band(reach: int, n: int = TOKENS) -> np.ndarray:
    return np.abs(np.subtract.outer(np.arange(n), np.arange(n))) <= reach


def moduli(P: np.ndarray) -> np.ndarray:
    return np.sort(np.abs(np.linalg.eigvals(P)))[::-1]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is small enough to be handled as a dense matrix."""
    monkeypatch.setattr(module, "DENSE_TOKENS", 4)


@pytest.mark.parametrize("seed", range(5))
def test_an_open_part_of_a_few_tokens_is_dense(seed: int) -> None:
    P = np.random.default_rng(seed).random((9, 9))
    P *= 0.8 / P.sum(1).max()
    found = open_part(csr_array(P))
    assert found.modulus.status == "exact: dense"
    assert found.modulus.value == pytest.approx(moduli(P)[0], rel=1e-12)
    assert found.gap == pytest.approx(1 - moduli(P)[0], rel=1e-12)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(5))
def test_a_larger_open_part_is_iterated_until_its_ratios_meet(seed: int) -> None:
    P = np.random.default_rng(seed).random((TOKENS, TOKENS))
    P *= 0.8 / P.sum(1).max()
    found = open_part(csr_array(P))
    assert found.modulus.value == pytest.approx(moduli(P)[0], rel=1e-11)
    assert found.gap == 1 - found.modulus.lower
    assert found.modulus.status.startswith("iterated")


def symmetric_spectrum(sees: np.ndarray) -> np.ndarray:
    """Of the symmetric form, largest modulus first, without the one 1 of the all-ones vector."""
    root = np.sqrt(sees.sum(1))
    values = np.linalg.eigvalsh(root[:, None] * uniform(sees) / root)
    return np.sort(np.abs(np.delete(values, values.argmax())))[::-1]


def constant_by_hand(sees: np.ndarray) -> float:
    """Expected squares of iid tokens late in depth, from P^t - 1 pi^T itself: c = relative residual / modulus^t."""
    P, t = uniform(sees), 1500
    pi = sees.sum(1) / sees.sum()
    left = np.linalg.matrix_power(P - pi, t)
    relative = np.linalg.norm(left - left.mean(0)) / (math.sqrt(len(sees)) * np.linalg.norm(pi))
    return math.log(relative) - t * math.log(symmetric_spectrum(sees)[0])


WAYS = {
    "exact: dense symmetric": {},
    "exact: factored": {"DENSE_TOKENS": 4},
    "iterated, an eigenvalue": {"DENSE_TOKENS": 4, "FACTOR_COST": 0},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reach", [3, 8])
def test_every_way_gives_the_second_eigenvalue_and_its_constant(
    way: str, reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WAYS[way].items():
        monkeypatch.setattr(module, name, value)
    sees = band(reach)
    found = closed_part(csr_array(uniform(sees)))
    want = symmetric_spectrum(sees)[0]
    assert found.modulus.status.startswith(way)
    assert found.modulus.value == pytest.approx(want, rel=1e-9)
    assert found.gap == pytest.approx(1 - want, rel=1e-8)
    assert found.log_constant == pytest.approx(constant_by_hand(sees), abs=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_an_eigenvalue_near_minus_one_is_not_overlooked(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token sees those of the other parity: eigenvalues 1, -1 and zeros, tokens never agree."""
    for name, value in WAYS[way].items():
        monkeypatch.setattr(module, name, value)
    own = np.arange(TOKENS)
    sees = np.subtract.outer(own, own) % 2 == 1
    found = closed_part(csr_array(uniform(sees)))
    assert found.modulus.value == pytest.approx(1.0, abs=1e-12)
    assert found.gap == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [32, 40])
def test_equal_rows_leave_nothing(way: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly nothing at a power of two, rounding otherwise."""
    for name, value in WAYS[way].items():
        monkeypatch.setattr(module, name, value)
    found = closed_part(csr_array(np.full((tokens, tokens), 1 / tokens)))
    assert (found.modulus.value, found.gap) == (0.0, 1.0)
    assert math.isnan(found.log_constant)


@pytest.mark.usefixtures("small")
def test_a_one_way_part_is_iterated_from_its_operator() -> None:
    rng = np.random.default_rng(0)
    P = uniform((rng.random((TOKENS, TOKENS)) < 0.3) | np.eye(TOKENS, dtype=bool))
    found = closed_part(csr_array(P))
    assert found.modulus.status.startswith("estimate: iterated, relative backward error")
    assert found.modulus.value == pytest.approx(moduli(P)[1], rel=1e-6)
    assert found.gap == 1 - found.modulus.lower


@pytest.mark.parametrize(("first", "n"), [(2, 5), (3, 9), (4, 4), (3, 4)])
def test_a_prefix_and_tokens_alone(first: int, n: int) -> None:
    """The prefix gives 1 and zeros, the tokens after it their own shares, the largest of them 1/(first + 1)."""
    sees = csr_array(np.arange(n) < np.maximum(np.arange(n) + 1, first)[:, None])
    found = second_eigenvalue(sees, connectivity(sees))
    assert found.modulus.lower == pytest.approx(1 / (first + 1) if n > first else 0.0, abs=1e-12)
    assert found.gap == pytest.approx(1 - found.modulus.lower, abs=1e-12)
