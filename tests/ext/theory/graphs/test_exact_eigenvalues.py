"""Second eigenvalues in whole numbers: all masks over two to four tokens, random larger ones, nilpotent, periodic."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import permutations

import mpmath
import numpy as np
import pytest
from scipy.sparse import csr_array

import rankscope as rs
from rankscope.ext.theory.graphs.connectivity import connectivity
from rankscope.ext.theory.graphs.second_eigenvalue import (
    SecondEigenvalue,
    _conditioned,
    equal_after,
    period,
    second_eigenvalue,
)


def characteristic(sees: np.ndarray) -> list[Fraction]:
    """Coefficients of det(xI - P), highest power first, by Faddeev and LeVerrier in fractions."""
    n = len(sees)
    P = [[Fraction(int(sees[i, j]), int(sees[i].sum())) for j in range(n)] for i in range(n)]
    found, M = [Fraction(1)], [[Fraction(0)] * n for _ in range(n)]
    for k in range(1, n + 1):
        M = [
            [sum(P[i][m] * M[m][j] for m in range(n)) + (found[-1] if i == j else 0) for j in range(n)]
            for i in range(n)
        ]
        trace = sum(P[i][m] * M[m][i] for i in range(n) for m in range(n))
        found.append(-trace / k)
    return found


def exact_modulus(sees: np.ndarray) -> float:
    """|lambda_2| from the polynomial: one root 1 divided out, roots 0 counted, the others to 40 digits."""
    return _modulus(tuple(characteristic(sees)))


@cache
def _modulus(polynomial: tuple[Fraction, ...]) -> float:
    left = [Fraction(1)]
    for coefficient in polynomial[1:-1]:
        left.append(coefficient + left[-1])
    while left and left[-1] == 0:
        left.pop()
    if len(left) <= 1:
        return 0.0
    with mpmath.workdps(40):
        roots = mpmath.polyroots([mpmath.mpf(c.numerator) / c.denominator for c in left], maxsteps=1000, extraprec=300)
        return float(max(abs(root) for root in roots))


def ours(sees: np.ndarray) -> SecondEigenvalue:
    return second_eigenvalue(csr_array(sees), connectivity(csr_array(sees)))


def check(sees: np.ndarray) -> bool:
    """Right, or between ends that lie close; whether it is known."""
    found, want = ours(sees).modulus, exact_modulus(sees)
    if found.status.startswith("exact"):
        assert found.value == pytest.approx(want, rel=1e-9, abs=0), (sees.astype(int).tolist(), found)
    if want == 0.0 or found.value in (0.0, 1.0):
        assert found.value == pytest.approx(want, rel=1e-14, abs=0), (sees.astype(int).tolist(), found)
    assert found.lower * (1 - 1e-6) <= want <= found.upper * (1 + 1e-6), (sees.astype(int).tolist(), found, want)
    assert found.upper - found.lower <= (2e-3 if len(sees) <= 4 else 1.0), (sees.astype(int).tolist(), found)
    return found.is_known


def all_graphs(tokens: int) -> list[np.ndarray]:
    """One of each class of masks that differ by the order of tokens only; every token sees something."""
    codes = np.arange(1 << tokens**2, dtype=np.int64)
    bits = ((codes[:, None] >> np.arange(tokens**2)) & 1).astype(bool).reshape(-1, tokens, tokens)
    weights = 1 << np.arange(tokens**2, dtype=np.int64)
    least = codes.copy()
    for order in permutations(range(tokens)):
        turned = bits[:, order][:, :, order].reshape(len(codes), -1) @ weights
        least = np.minimum(least, turned)
    kept = (least == codes) & bits.any(2).all(1)
    return list(bits[kept])


@pytest.mark.parametrize("tokens", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_mask_over_a_few_tokens_against_exact_arithmetic(tokens: int) -> None:
    graphs = all_graphs(tokens)
    assert len(graphs) == {2: 6, 3: 70, 4: 2340}[tokens]  # by Burnside: (343 + 3 * 21 + 2 * 7) / 6 for three
    known = [check(sees) for sees in graphs]
    assert np.mean(known) > 0.98


def test_random_masks_against_exact_arithmetic() -> None:
    rng = np.random.default_rng(0)
    known = []
    for _ in range(80):
        n = int(rng.integers(5, 9))
        sees = rng.random((n, n)) < rng.uniform(0.1, 0.6)
        sees[np.arange(n), rng.integers(0, n, n)] = True
        known.append(check(sees))
    assert np.mean(known) > 0.95


def de_bruijn(symbols: int, length: int) -> np.ndarray:
    n = symbols**length
    sees = np.zeros((n, n), dtype=bool)
    for token in range(n):
        sees[token, [(symbols * token + s) % n for s in range(symbols)]] = True
    return sees


@pytest.mark.parametrize(("symbols", "length"), [(2, 2), (2, 3), (2, 6), (2, 9), (2, 10), (3, 4)])
def test_a_mask_that_averages_exactly_has_second_eigenvalue_zero(symbols: int, length: int) -> None:
    """Rounding shows a nilpotent matrix of index k with eigenvalues of eps^(1/k): .0073, .3 and more."""
    sees = de_bruijn(symbols, length)
    found = ours(sees)
    assert found.modulus.value == 0.0
    assert found.gap == 1.0
    assert equal_after(csr_array(sees), 20) == length


def test_mask_graph_of_a_nilpotent_mask_says_after_how_many_layers_tokens_are_equal(tmp_path) -> None:
    np.save(tmp_path / "a.npy", de_bruijn(2, 3).astype(np.int8))
    found = rs.graph(tmp_path / "a.npy")
    assert found.lambda_2 == 0.0
    assert found.equal_after == 3
    assert found.layers_to_agreement == 3
    assert found.verdict == "Tokens agree to 1e-3 after 3 layers; equal after 3 layers."
    assert rs.graph("complete", 8).verdict == "Tokens agree to 1e-3 after 1 layer; equal after one layer."


def test_a_chain_that_ends_in_one_token_is_nilpotent_by_its_graph() -> None:
    """Token i sees token i - 1 only: all hold the first token's value after n - 1 layers."""
    n = 40
    sees = np.eye(n, k=-1, dtype=bool)
    sees[0, 0] = True
    assert ours(sees).modulus.value == 0.0
    assert equal_after(csr_array(sees), n) == n - 1


@pytest.mark.parametrize("tokens", [2, 3, 5, 7, 600])
def test_a_cycle_never_agrees(tokens: int) -> None:
    sees = np.roll(np.eye(tokens, dtype=bool), 1, axis=1)
    assert period(csr_array(sees)) == tokens
    found = ours(sees)
    assert (found.modulus.value, found.gap) == (1.0, 0.0)


@pytest.mark.parametrize("expression", ["~window(0)", "~(window(0))"])
def test_mask_graph_of_a_periodic_mask_says_that_tokens_never_agree(expression: str) -> None:
    """Two tokens that see each other and not themselves: a KeyError once."""
    found = rs.graph(expression, 2)
    assert found.lambda_2 == 1.0
    assert found.spectral_gap == 0.0
    assert found.layers_to_agreement is None
    assert "never agree" in found.verdict
    assert "never agree" in str(found)
    assert found.to_json()["layers_to_1e-3"] is None
    assert "never" not in rs.graph(expression, 3).verdict


def test_periodic_masks_of_every_shape_have_a_verdict(tmp_path) -> None:
    """Bipartite, cycles of cycles, and tokens outside that follow a periodic part."""
    bipartite = np.zeros((6, 6), dtype=bool)
    bipartite[:3, 3:] = bipartite[3:, :3] = True
    follows = np.zeros((5, 5), dtype=bool)
    follows[0, 1] = follows[1, 2] = follows[2, 0] = follows[3, 0] = follows[4, [3, 4]] = True
    six = np.roll(np.eye(6, dtype=bool), 1, axis=1)
    six[0, 4] = True  # cycles of length 6 and 3
    for number, (sees, rounds) in enumerate(((bipartite, 2), (follows, 3), (six, 3))):
        np.save(tmp_path / f"{number}.npy", sees.astype(np.int8))
        found = rs.graph(tmp_path / f"{number}.npy")
        assert found.lambda_2 == 1.0
        assert f"multiple of {rounds} long" in found.statuses["lambda_2"]
        assert "never agree" in found.verdict


@pytest.mark.parametrize("size", [3, 4, 8, 16])
def test_eigenvalues_that_meet_are_given_by_their_ends(size: int) -> None:
    """A Jordan block of .3, turned: rounding spreads its one eigenvalue over a circle of radius eps^(1/size)."""
    turn = np.linalg.qr(np.random.default_rng(size).standard_normal((size, size)))[0]
    found = _conditioned(turn @ (0.3 * np.eye(size) + 0.2 * np.eye(size, k=1)) @ turn.T)
    assert found.modulus.lower < 0.3 < found.modulus.upper
    assert found.modulus.status.startswith("dense, eigenvalues that nearly meet")
