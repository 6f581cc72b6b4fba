r"""Linear stability of a state: the largest factor of a linear map that is only given as a function. Ours.

Arnoldi iteration on callables. A map on (tokens, dim) perturbations is restricted to centred ones (equal shifts of all
tokens are not collapse), so the result is the factor of :math:`C\,\mathcal{J}\,C`. Below 1 the block pulls a small
residual toward collapse, above 1 it pushes away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg.scaled import centred

LinearMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class StabilityFactor:
    """The largest factor found, and its accuracy.

    Attributes:
        factor: modulus of the eigenvalue.
        eigenvalue: with its phase.
        backward_error: norm of (map - eigenvalue) on the unit vector found, over the factor. The map is that close to
            one with exactly this eigenvalue; the factor of a strongly non-normal map may be further away.
        converged: whether ``backward_error`` reached the tolerance.
        applications: how often the map was applied.
        direction: real part of the perturbation that has this factor, of norm 1.
    """

    factor: float
    eigenvalue: complex
    backward_error: float
    converged: bool
    applications: int
    direction: Float[Tensor, "tokens dim"]


def stability_factor(
    jvp: LinearMap,
    tokens: int,
    dim: int,
    *,
    seed: int = 0,
    krylov: int = 40,
    restarts: int = 25,
    tolerance: float = 1e-10,
    device: torch.device | None = None,
) -> StabilityFactor:
    r"""Spectral radius of a linear map on centred perturbations: the factor per layer when the layer is repeated.

    **Estimate** with its backward error. If several eigenvalues share a modulus, one is returned. 0 for a map that
    maps centred perturbations to equal rows, as attention with a complete mask and no positions does at collapse.

    Args:
        jvp: linear function of a float64 (tokens, dim) perturbation, such as a Jacobian-vector product at the collapsed
            state.
        tokens: rows of a perturbation.
        dim: its columns.
        seed: of the random start.
        krylov: applications before a restart.
        restarts: how often at most.
        tolerance: backward error, relative to the factor, at which to stop.
        device: device of the map; None for the CPU. The start does not depend on it.

    Example:
        >>> found = stability_factor(lambda R: R @ torch.diag(torch.tensor([0.5, -2.0]).double()), tokens=3, dim=2)
        >>> round(found.eigenvalue.real, 9), found.converged
        (-2.0, True)
    """
    if tokens < 2:
        raise InputError(f"The stability of {tokens} tokens was asked for. Expected at least two.")
    start = torch.randn(tokens, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(device)
    return _dominant(lambda R: centred(jvp(R)), centred(start), krylov, restarts, tolerance)


def _dominant(apply: LinearMap, start: Tensor, krylov: int, restarts: int, tolerance: float) -> StabilityFactor:
    vector, applied = start / torch.linalg.vector_norm(start), 0
    for _ in range(restarts):
        basis, H, invariant = _arnoldi(apply, vector, min(krylov, vector.numel()))
        applied += H.shape[1]
        values, vectors = torch.linalg.eig(H[: H.shape[1]])
        top = int(values.abs().argmax())
        ritz = vectors[:, top] / torch.linalg.vector_norm(vectors[:, top])
        modulus = float(values[top].abs())
        miss = 0.0 if invariant else float(H[-1, -1] * ritz[-1].abs())
        error = miss / modulus if modulus > 0 else (0.0 if miss == 0 else float("inf"))
        direction = torch.tensordot(ritz.real, basis[: H.shape[1]], 1)
        vector = direction / torch.linalg.vector_norm(direction)
        if error <= tolerance:
            break
    return StabilityFactor(modulus, complex(values[top].item()), error, error <= tolerance, applied, vector)


def _arnoldi(apply: LinearMap, start: Tensor, steps: int) -> tuple[Tensor, Tensor, bool]:
    """Orthonormal Krylov basis, the (m+1) x m Hessenberg matrix, and whether the span maps into itself."""
    basis = [start]
    H = start.new_zeros(steps + 1, steps)
    for j in range(steps):
        moved = apply(basis[j])
        size = torch.linalg.vector_norm(moved)
        if not bool(size.isfinite()):
            raise InputError("The linear map gave numbers that are not finite. Check the state it was taken at.")
        known = torch.stack(basis)
        for _ in range(2):  # the second pass removes the rounding error of the first
            overlap = torch.tensordot(known, moved, moved.ndim)
            moved = moved - torch.tensordot(overlap, known, 1)
            H[: j + 1, j] += overlap
        left = torch.linalg.vector_norm(moved)
        if bool(left <= 8 * torch.finfo(torch.float64).eps * torch.maximum(size, torch.linalg.matrix_norm(H))):
            return known, H[: j + 2, : j + 1], True
        H[j + 1, j] = left
        basis.append(moved / left)
    return torch.stack(basis[:steps]), H, False
