"""Mixing of streams against closed forms and products formed in 60 digits."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch import Tensor

from rankscope.linalg.stream_mixing import (
    contraction,
    kind_of,
    log_product_contractions,
    on_differences,
    second_eigenvalue,
)


def doubly(n: int, seed: int) -> Tensor:
    scores = torch.rand(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    for _ in range(400):
        scores = scores / scores.sum(-1, keepdim=True)
        scores = scores / scores.sum(-2, keepdim=True)
    return scores


@pytest.mark.parametrize("n", [2, 3, 4, 7])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_lazy_averaging_keeps_its_share(n: int, share: float) -> None:
    """H = share I + (1 - share) J: both numbers are the share."""
    D = on_differences(share * torch.eye(n, dtype=torch.float64) + (1 - share) / n)
    assert float(contraction(D)) == pytest.approx(share, abs=1e-12)
    assert float(second_eigenvalue(D)) == pytest.approx(share, abs=1e-12)


def test_a_permutation_keeps_differences_and_a_shear_grows_them() -> None:
    turn = torch.eye(4).roll(1, dims=0)
    assert float(contraction(on_differences(turn))) == pytest.approx(1.0)
    assert float(second_eigenvalue(on_differences(turn))) == pytest.approx(1.0)
    # One stream copied to all others at once, and a matrix that is not normal: the two numbers differ.
    lower = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.0, 0.9, 0.1]], dtype=torch.float64)
    assert float(second_eigenvalue(on_differences(lower))) == pytest.approx(0.1, abs=1e-6)  # a double one
    assert float(contraction(on_differences(lower))) > 0.5


def test_eigenvalues_are_those_of_a_stochastic_matrix_without_the_first() -> None:
    H = torch.rand(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    H = H / H.sum(-1, keepdim=True)
    rest = sorted(torch.linalg.eigvals(H).abs().tolist())[:-1]
    assert sorted(torch.linalg.eigvals(on_differences(H)).abs().tolist()) == pytest.approx(rest)


def test_kinds() -> None:
    H = doubly(4, 0)
    assert kind_of(H) == "doubly stochastic"
    assert kind_of(torch.tensor([[1.0, 0.0], [1.0, 0.0]])) == "row-stochastic"
    assert kind_of(H.T @ torch.tensor([[2.0, -1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]).double()) == (
        "not stochastic"
    )
    assert kind_of(torch.ones(4, 4)) == "not stochastic"


def test_products_far_below_the_float_floor() -> None:
    """200 blocks shrink differences to 10^-100 or so; compared with products in 400 digits."""
    matrices = [doubly(4, seed) for seed in range(200)]
    found = float(list(log_product_contractions(matrices, stochastic=True))[-1])
    with mpmath.workdps(400):
        product = mpmath.eye(4)
        for H in matrices:
            # The sums are one up to rounding; the law is about sums of one, so the last column is set by the others.
            exact = mpmath.matrix(H.tolist())
            for row in range(4):
                exact[row, 3] = 1 - exact[row, 0] - exact[row, 1] - exact[row, 2]
            product = exact * product
        centred = (mpmath.eye(4) - mpmath.ones(4) / 4) * product
        largest = max(mpmath.svd_r(centred, compute_uv=False))
        expected = float(mpmath.log(largest))
    assert expected < -100 * math.log(10) / 2
    assert found == pytest.approx(expected, rel=1e-9)


def test_products_that_are_not_stochastic_are_formed_whole() -> None:
    torch.manual_seed(0)
    matrices = [torch.eye(3).double() + 0.3 * torch.randn(3, 3).double() for _ in range(6)]
    *_, last = log_product_contractions(matrices, stochastic=False)
    product = torch.linalg.multi_dot(matrices[::-1])
    centre = torch.eye(3).double() - 1 / 3
    assert float(last) == pytest.approx(float(torch.linalg.matrix_norm(centre @ product @ centre, ord=2).log()))
