"""Direction-free constants: they hold, they are attained where they claim to be, and they say why they are empty."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rankscope._errors import InputError
from rankscope.theory.attention_weights import HeadTensors, head_tensors
from rankscope.theory.cubic_constants import span_constants, uniform_constants
from rankscope.theory.cubic_law import cubic_constant
from rankscope.theory.operator_norms import head_norms
from tests.theory.networks import random_layer


def of_rank(rng: np.random.Generator, n: int, dim: int, rank: int) -> torch.Tensor:
    U = rng.normal(size=(n, rank))
    return torch.from_numpy((U - U.mean(0)) @ rng.normal(size=(rank, dim)))


def one_head(A: np.ndarray, W: np.ndarray) -> HeadTensors:
    eye = torch.eye(len(A), dtype=torch.float64).unsqueeze(0)
    return head_tensors(torch.from_numpy(A).unsqueeze(0), eye, torch.from_numpy(W).unsqueeze(0), eye, scale=1.0)


@pytest.mark.parametrize(("heads", "width", "rank"), [(1, 4, 1), (1, 4, 3), (2, 3, 2), (4, 2, 2), (8, 1, 1)])
def test_span_constants_hold_for_every_left_factor(heads: int, width: int, rank: int) -> None:
    """R and QR with Q orthogonal and fixing the all-ones vector share singular values and right vectors."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        layer = random_layer(rng, dim=8, heads=heads, d_qk=width, d_v=width).tensors
        R = of_rank(rng, 6, 8, rank)
        found = span_constants(R, layer)
        assert found.log_lower_bound > -math.inf
        for _ in range(5):
            again = R[torch.from_numpy(rng.permutation(6))]
            c = float(cubic_constant(again, layer))
            assert found.log_lower_bound <= c + 1e-12 <= found.log_upper_bound + 2e-12


def test_pairing_the_largest_with_the_smallest_is_attained() -> None:
    """V^TAV = antidiagonal and W = I: the lower bound is the value, and it is below the pairing of like with like."""
    n, k = 4, 3
    U = np.linalg.qr(np.column_stack([np.ones(n), np.random.default_rng(1).normal(size=(n, k))]))[0][:, 1:]
    S = np.array([3.0, 2.0, 0.5])
    R = torch.from_numpy(U * S)
    flipped, straight = one_head(np.eye(k)[::-1].copy(), np.eye(k)), one_head(np.eye(k), np.eye(k))
    found = span_constants(R, flipped)
    assert found.log_lower_bound == pytest.approx(float(cubic_constant(R, flipped)), abs=1e-12)
    assert found.reason.startswith("smallest singular values")
    assert float(cubic_constant(R, straight)) > found.log_lower_bound + 0.5


def test_uniform_lower_bound_needs_a_definite_symmetric_part() -> None:
    rng = np.random.default_rng(2)
    half = rng.normal(size=(3, 3))
    skew = np.triu(rng.normal(size=(3, 3)), 1)
    definite = one_head(half @ half.T + 0.1 * np.eye(3) + skew - skew.T, rng.normal(size=(3, 3)))
    found = uniform_constants(definite, tokens=5)
    assert "is definite" in found.reason
    for _ in range(200):
        c = float(cubic_constant(of_rank(rng, 5, 3, int(rng.integers(1, 4))), definite))
        assert found.log_lower_bound <= c <= found.log_upper_bound
    indefinite = one_head(np.diag([1.0, -1.0]), np.eye(2))
    empty = uniform_constants(indefinite, tokens=5)
    assert empty.log_lower_bound == -math.inf
    assert "not definite" in empty.reason
    kernel = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    assert float(cubic_constant(kernel, indefinite)) == -math.inf


def test_two_heads_can_cancel_and_no_lower_bound_is_claimed() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    both = torch.stack([eye, eye])
    cancelling = head_tensors(both, both, torch.stack([eye, -eye]), both)
    R = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    assert float(cubic_constant(R, cancelling)) == -math.inf
    assert "cancel" in uniform_constants(cancelling, 3).reason
    assert span_constants(R, cancelling).log_lower_bound == -math.inf


def test_uniform_upper_is_attained_by_the_top_singular_vectors() -> None:
    """One head with A = W = I: rank-one residuals reach 1/n."""
    found = uniform_constants(one_head(np.eye(3), np.eye(3)), tokens=4)
    R = torch.tensor([[1.0, 0, 0], [-1.0, 0, 0], [0, 0, 0], [0, 0, 0]])
    assert found.log_upper_bound == pytest.approx(float(cubic_constant(R, one_head(np.eye(3), np.eye(3)))), abs=1e-12)


def test_norms_from_factors_are_those_of_the_products() -> None:
    layer = random_layer(np.random.default_rng(3), dim=6, heads=3, d_qk=2, d_v=4)
    found = head_norms(layer.tensors)
    for i, head in enumerate(layer.heads):
        score = layer.scale * np.linalg.norm(head["W_Q"] @ head["W_K"].T, 2)
        assert float(found.score[i]) == pytest.approx(score, rel=1e-13)
        assert float(found.value[i]) == pytest.approx(np.linalg.norm(head["W_V"] @ head["W_O"], 2), rel=1e-13)


def test_what_has_no_constants_is_refused() -> None:
    with pytest.raises(InputError, match="at least two"):
        uniform_constants(one_head(np.eye(2), np.eye(2)), tokens=1)
    with pytest.raises(InputError, match="not zero"):
        span_constants(torch.zeros(3, 2), one_head(np.eye(2), np.eye(2)))
