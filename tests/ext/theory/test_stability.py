"""Factors of linear maps known only by what they do, against the full matrices."""

from __future__ import annotations

import math

import pytest
import torch

from rankscope.errors import InputError
from rankscope.ext.theory.contraction import heads_map
from rankscope.ext.theory.stability import StabilityFactor, stability_factor


def full_matrix(P: torch.Tensor, W_V: torch.Tensor, W_O: torch.Tensor, skip: float) -> torch.Tensor:
    """(C (x) I)(skip + sum_h P_h (x) W_h^T) on centred matrices, row-major vectorised."""
    n, dim = P.shape[-1], W_V.shape[1]
    eye = torch.eye(dim, dtype=torch.float64)
    C = torch.kron(torch.eye(n, dtype=torch.float64) - 1 / n, eye)
    total = sum(torch.kron(P[h], (W_V[h] @ W_O[h]).T.contiguous()) for h in range(P.shape[0]))
    return C @ (total + skip * torch.eye(n * dim, dtype=torch.float64)) @ C


def heads_factor(P: torch.Tensor, W_V: torch.Tensor, W_O: torch.Tensor, skip: float = 0.0) -> StabilityFactor:
    apply, _ = heads_map(P, W_V, W_O)
    return stability_factor(lambda R: skip * R + apply(R), P.shape[-1], W_V.shape[1])


@pytest.mark.parametrize("skip", [0.0, 0.5, 1.0])
def test_heads_that_attend_differently(skip: float) -> None:
    P = torch.softmax(2 * torch.randn(3, 7, 7, dtype=torch.float64), -1)
    W_V, W_O = torch.randn(3, 4, 2, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64)
    full = full_matrix(P, W_V, W_O, skip)
    factor = heads_factor(P, W_V, W_O, skip)
    assert factor.converged
    assert factor.factor == pytest.approx(float(torch.linalg.eigvals(full).abs().max()), rel=1e-8)


def test_map_and_transpose_are_adjoint() -> None:
    P = torch.softmax(torch.randn(2, 5, 5, dtype=torch.float64), -1)
    apply, transpose = heads_map(P, torch.randn(2, 3, 2), torch.randn(2, 2, 3))
    R, S = torch.randn(2, 5, 3, dtype=torch.float64)
    assert float((apply(R) * S).sum()) == pytest.approx(float((R * transpose(S)).sum()), rel=1e-12)


def test_same_attention_in_all_heads_factors() -> None:
    """One causal attention for all heads: half the spectral radius of the summed values."""
    causal = torch.ones(6, 6, dtype=torch.float64).tril()
    P = (causal / causal.sum(-1, keepdim=True)).expand(2, 6, 6)
    W_V, W_O = torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(2, 3, 3, dtype=torch.float64)
    radius = float(torch.linalg.eigvals((W_V @ W_O).sum(0)).abs().max())
    assert heads_factor(P, W_V, W_O).factor == pytest.approx(radius / 2, rel=1e-8)


def test_rotation_has_a_complex_pair() -> None:
    turn = 3 * torch.tensor([[math.cos(1), math.sin(1)], [-math.sin(1), math.cos(1)]], dtype=torch.float64)
    found = stability_factor(lambda R: R @ turn, tokens=4, dim=2)
    assert found.factor == pytest.approx(3, rel=1e-12)
    assert abs(found.eigenvalue.imag) == pytest.approx(3 * math.sin(1), rel=1e-12)


def test_common_shifts_do_not_count() -> None:
    """Complete attention sends centred perturbations to equal rows: factor 0, though it keeps the mean."""
    found = stability_factor(lambda R: R.mean(0, keepdim=True).expand_as(R), tokens=5, dim=3)
    assert found.factor < 1e-15
    shifted = stability_factor(lambda R: 0.3 * R + 100 * R.mean(0, keepdim=True), tokens=5, dim=3)
    assert shifted.factor == pytest.approx(0.3, rel=1e-12)


def test_jacobian_of_a_real_block() -> None:
    """Jacobian-vector products of an attention block with skip at equal tokens: attention adds nothing, so 1."""
    dim, n = 4, 6
    W = torch.randn(3, dim, dim, dtype=torch.float64)

    def block(X: torch.Tensor) -> torch.Tensor:
        return X + torch.softmax(X @ W[0] @ (X @ W[1]).T, -1) @ X @ W[2]

    collapsed = torch.randn(dim, dtype=torch.float64).repeat(n, 1)
    found = stability_factor(lambda R: torch.func.jvp(block, (collapsed,), (R,))[1], n, dim)
    assert found.factor == pytest.approx(1, abs=1e-12)
    assert found.converged


def test_direction_is_multiplied_by_the_factor() -> None:
    M = torch.diag(torch.tensor([1.0, 2.0, -5.0], dtype=torch.float64))
    found = stability_factor(lambda R: R @ M, tokens=4, dim=3)
    torch.testing.assert_close(found.direction @ M, -5 * found.direction, rtol=0, atol=1e-9)


def test_without_enough_applications_it_says_so() -> None:
    M = torch.diag(torch.linspace(0.9, 1, 60, dtype=torch.float64))
    hurried = stability_factor(lambda R: R @ M, tokens=3, dim=60, krylov=3, restarts=1)
    assert not hurried.converged
    assert hurried.applications == 3
    assert hurried.backward_error > 1e-10
    patient = stability_factor(lambda R: R @ M, tokens=3, dim=60, restarts=50)
    assert patient.converged
    assert patient.factor == pytest.approx(1, rel=1e-8)


def test_one_token_and_broken_maps_are_refused() -> None:
    with pytest.raises(InputError, match="at least two"):
        stability_factor(lambda R: R, 1, 2)
    with pytest.raises(InputError, match="not finite"):
        stability_factor(lambda R: R * math.nan, 3, 2)
    with pytest.raises(InputError, match=r"\(2, 3, 4\)"):
        heads_map(torch.ones(2, 3, 4), torch.ones(2, 1, 1), torch.ones(2, 1, 1))
