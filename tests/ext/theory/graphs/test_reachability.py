"""Many searches at once, in pieces."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import floyd_warshall

from rankscope.ext.theory.graphs import distances
from rankscope.ext.theory.graphs.distances import reach_of_many

TOKENS = 150


def graph(seed: int) -> np.ndarray:
    """A ring that is walked one way, with a few shortcuts: distances of many sizes, all finite."""
    sees = np.random.default_rng(seed).random((TOKENS, TOKENS)) < 0.002
    return sees | np.eye(TOKENS, dtype=bool) | np.roll(np.eye(TOKENS, dtype=bool), -1, axis=1)


def eccentricities(sees: np.ndarray) -> np.ndarray:
    weights = np.where(sees.T & ~np.eye(len(sees), dtype=bool), 1.0, 0.0)
    found: np.ndarray = floyd_warshall(csr_array(weights), directed=True, unweighted=True).max(1)
    return found


@pytest.mark.parametrize("pieces", [1, 64, 1000])
@pytest.mark.parametrize("seed", [0, 1])
def test_any_piece_size_gives_all_pairs(pieces: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distances, "SOURCES_AT_ONCE", pieces)
    sees = graph(seed)
    want = eccentricities(sees)
    assert want.max() > want.min()
    assert reach_of_many(csr_array(sees), np.arange(TOKENS)).tolist() == want.tolist()
    some = np.array([149, 3, 3, 70])
    assert reach_of_many(csr_array(sees), some).tolist() == want[some].tolist()
    assert reach_of_many(csr_array(sees & ~np.eye(TOKENS, dtype=bool)), np.arange(TOKENS)).tolist() == want.tolist()


def test_a_token_that_never_reaches_all() -> None:
    """A path of 5 that looks back: the first token is everywhere after 4 layers, the others never."""
    path = csr_array(np.eye(5) + np.eye(5, k=-1))
    assert reach_of_many(path, np.arange(5)).tolist() == [4.0] + [np.inf] * 4
    assert reach_of_many(csr_array(np.ones((1, 1))), np.array([0])).tolist() == [0.0]
    assert reach_of_many(path, np.array([], dtype=np.int64)).tolist() == []
