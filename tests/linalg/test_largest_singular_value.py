"""Block Lanczos against LAPACK."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rankscope.linalg.largest_singular_value import SingularValue, largest_singular_values, singular_value_within


def found(A: Tensor, *, block: int = 4, passes: int = 300, upper: float = float("inf"), seed: int = 0) -> SingularValue:
    start = torch.randn(A.shape[1], block, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    Z = torch.linalg.qr(start).Q
    [value] = largest_singular_values(
        lambda numbers, X: A.T @ (A @ X),
        Z[None],
        A.T @ (A @ Z)[None],
        [float(A.square().sum())],
        upper=[upper],
        passes=passes,
        tolerance=1e-10,
    )
    return value


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["gaussian", "flat", "graded", "twins"])
def test_converges_to_the_largest(seed: int, kind: str) -> None:
    A = torch.randn(120, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    U, s, V = torch.linalg.svd(A, full_matrices=False)
    s = {
        "gaussian": s,
        "flat": torch.ones_like(s),
        "graded": torch.logspace(0, -12, 120, dtype=torch.float64),
        "twins": torch.cat([s[:1], s[:1], s[1:-1]]),
    }[kind]
    got = found(U * s @ V, seed=seed)
    assert not got.is_estimate
    assert got.lower == pytest.approx(float(s[0]), rel=1e-10)
    assert got.upper >= float(s[0]) * (1 - 1e-10)


@pytest.mark.parametrize("passes", [1, 2, 3, 5])
def test_the_interval_holds_the_value_at_every_step_and_shrinks(passes: int) -> None:
    A = torch.randn(300, 250, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    true, got = float(torch.linalg.matrix_norm(A, 2)), found(A, passes=passes)
    assert got.is_estimate
    assert got.passes == passes
    assert got.lower <= true <= got.upper
    assert got.lower >= found(A, passes=1).lower


def test_low_rank_is_certain_at_once() -> None:
    """A block that holds the whole row space leaves no energy outside."""
    A = torch.outer(torch.arange(1.0, 9.0), torch.arange(2.0, 9.0)).double()
    got = found(A, block=7, passes=1)
    assert not got.is_estimate
    assert got.upper == pytest.approx(got.lower, rel=1e-9)


@pytest.mark.parametrize(("tolerance", "is_estimate"), [(1e-5, False), (1e-6, True)])
def test_the_tolerance_is_relative(tolerance: float, is_estimate: bool) -> None:
    """The ends 10 and 10 + 5e-5."""
    gram = torch.tensor([[100.0]], dtype=torch.float64)
    assert singular_value_within(gram, 100.001, 99.0, tolerance=tolerance).is_estimate is is_estimate
