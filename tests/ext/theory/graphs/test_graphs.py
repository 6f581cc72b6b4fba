"""Graphs of masks against all-pairs distances and dense eigenvalues."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import floyd_warshall

from rankscope.ext.theory.graphs import distances
from rankscope.ext.theory.graphs.connectivity import connectivity
from rankscope.ext.theory.graphs.distances import depths, radius_and_diameter
from rankscope.ext.theory.graphs.mixing import followed, layers_to_agree, transient_layers
from rankscope.ext.theory.graphs.second_eigenvalue import closed_part, open_part, second_eigenvalue


def all_pairs(sees: np.ndarray) -> np.ndarray:
    """d[s, v]: layers from s to v; information flows from what is seen to who sees."""
    weights = np.where(sees.T, 1.0, 0.0)
    np.fill_diagonal(weights, 0)
    return floyd_warshall(csr_array(weights), directed=True, unweighted=True)


def uniform(sees: np.ndarray) -> np.ndarray:
    return sees / sees.sum(1, keepdims=True)


def second_modulus(sees: np.ndarray) -> float:
    """Straight from the definition: all eigenvalues, less one 1."""
    moduli = np.sort(np.abs(np.linalg.eigvals(uniform(sees))))
    return float(moduli[-2])


@st.composite
def graphs(draw: st.DrawFn) -> np.ndarray:
    n = draw(st.integers(2, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sees = rng.random((n, n)) < draw(st.sampled_from([0.03, 0.1, 0.3, 0.8]))
    if draw(st.booleans()):
        sees = np.tril(sees)
    return sees | np.eye(n, dtype=bool)


@given(graphs())
def test_radius_diameter_and_centres_are_those_of_all_pairs(sees: np.ndarray) -> None:
    reach = all_pairs(sees).max(1)
    how = connectivity(csr_array(sees))
    radius, diameter = radius_and_diameter(csr_array(sees), how)
    assert how.centres.tolist() == np.flatnonzero(np.isfinite(reach)).tolist()
    assert how.is_strong == bool(np.isfinite(reach).all())
    assert (radius.lower, radius.upper) == (reach.min(), reach.min())
    assert (diameter.lower, diameter.upper) == (reach.max(), reach.max())


@given(graphs())
def test_without_budget_the_brackets_still_hold(sees: np.ndarray) -> None:
    reach = all_pairs(sees).max(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distances, "EDGES_BUDGET", 4 * int(sees.sum()))
        patch.setattr(distances, "PAIRS_BUDGET", 0)
        radius, diameter = radius_and_diameter(csr_array(sees), connectivity(csr_array(sees)))
    assert radius.lower <= reach.min() <= radius.upper
    assert diameter.lower <= reach.max() <= diameter.upper
    for bracket in (radius, diameter):
        assert bracket.is_known or bracket.status.startswith("between bounds")


@given(graphs())
def test_depths_are_those_of_all_pairs(sees: np.ndarray) -> None:
    assert np.array_equal(depths(csr_array(sees.T), 0), all_pairs(sees)[0])


@given(graphs())
def test_second_eigenvalue_is_that_of_the_dense_matrix(sees: np.ndarray) -> None:
    found = second_eigenvalue(csr_array(sees), connectivity(csr_array(sees)))
    # a defective eigenvalue of a block of m tokens is only good to eps^(1/m) in the dense solver
    assert found.modulus.lower == pytest.approx(second_modulus(sees), abs=1e-4)
    assert found.gap == pytest.approx(1 - found.modulus.lower, abs=1e-12)


def band(n: int, reach: int) -> np.ndarray:
    return np.abs(np.subtract.outer(np.arange(n), np.arange(n))) <= reach


@pytest.mark.parametrize("reach", [1, 7, 60])
def test_large_symmetric_parts_agree_with_the_dense_eigenvalues(reach: int) -> None:
    """Factored above 512 tokens, against numpy's symmetric solver."""
    sees = band(700, reach)
    root = np.sqrt(sees.sum(1))
    want = np.linalg.eigvalsh(root[:, None] * uniform(sees) / root)[-2]
    found = second_eigenvalue(csr_array(sees), connectivity(csr_array(sees)))
    assert found.modulus.status == "exact: factored"
    assert found.gap == pytest.approx(1 - want, rel=1e-8)


def test_large_open_and_one_way_parts() -> None:
    rng = np.random.default_rng(1)
    sees = (rng.random((600, 600)) < 0.02) | np.eye(600, dtype=bool)
    P = csr_array(uniform(sees))
    want = np.sort(np.abs(np.linalg.eigvals(P.toarray())))[-2]
    found = closed_part(P)
    assert found.modulus.value == pytest.approx(want, rel=0.02)
    assert "backward error" in found.modulus.status
    leaking = csr_array(0.9 * P.toarray())
    assert open_part(leaking).modulus.value == pytest.approx(0.9, rel=1e-9)


@pytest.mark.slow
def test_the_mode_foretells_the_depth_of_agreement() -> None:
    """From the eigenvalue and its constant alone, against the run itself on many features."""
    sees = band(64, 3)
    second = second_eigenvalue(csr_array(sees), connectivity(csr_array(sees)))
    P = uniform(sees)
    start = np.random.default_rng(0).standard_normal((64, 4096))
    whole = followed(lambda x: P @ x, start, None, 1 - second.gap, 4000)
    short = followed(lambda x: P @ x, start, None, 1 - second.gap, 20)
    seen, foretold = layers_to_agree(whole, second), layers_to_agree(short, second)
    assert seen.status == "simulated"
    assert foretold.status == "from the second eigenvalue and its mode"
    assert foretold.lower == pytest.approx(seen.lower, rel=0.01)


def test_a_run_cut_short_gives_a_lower_bound_only() -> None:
    n = 64
    sees = np.tril(band(n, 3))
    P, second = uniform(sees), second_eigenvalue(csr_array(sees), connectivity(csr_array(sees)))
    start = np.random.default_rng(0).standard_normal((n, 8))
    short = followed(lambda x: P @ x, start, 0, 0.5, 10)
    whole = followed(lambda x: P @ x, start, 0, 0.5, 500)
    assert layers_to_agree(short, second).upper == math.inf
    assert layers_to_agree(short, second).lower <= layers_to_agree(whole, second).lower
    assert transient_layers(short, second).upper == math.inf
    assert 2 * n / 3 * 0.7 < transient_layers(whole, second).lower < 2 * n / 3 * 1.3


def test_the_decay_is_that_of_powers() -> None:
    P = uniform(np.tril(np.ones((12, 12))))
    start = np.random.default_rng(3).standard_normal((12, 5))
    decay = followed(lambda x: P @ x, start, 0, 0.5, 12)
    x = start
    for value in decay.log10_relative:
        assert 10**value == pytest.approx(np.linalg.norm(x - x.mean(0)) / np.linalg.norm(x), rel=1e-10)
        x = P @ x
