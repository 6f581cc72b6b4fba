r"""Singular values, from the Gram matrix if that is as accurate as the input, otherwise from the matrix itself.

Fallbacks, in order:

1. eigenvalues of the float64 Gram matrix, for the whole stack in one call;
2. the same, matrix by matrix, if LAPACK did not converge on one of the stack;
3. singular values of the Gram matrix (it is positive semi-definite, so they are its eigenvalues) for that matrix.

The sum and the norm of the eigenvalues are always compared with the trace and the Frobenius norm of the matrix.
Where they differ, as in releases whose batched solver on an accelerator was wrong, the matrix goes to the CPU.

A Gram matrix squares the condition number: a singular value below about
:math:`\sqrt{\varepsilon_{64}} \approx 10^{-8}` of the largest is lost in it. Rounding X to float32 or narrower already
changes every singular value by more than that, so for such input the Gram matrix loses no accuracy. For float64 input,
:func:`is_lost_in_gram` says which matrices need :func:`direct_singular_values`.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from rankscope.errors import UnsupportedOperationError
from rankscope.linalg.precision import is_wide
from rankscope.linalg.threads import available_threads, over_threads

# A singular value of 1e-2 of the largest keeps 12 of 16 digits in a float64 Gram matrix: the error is eps/ratio^2.
_RESOLVED_BY_GRAM = 1e-2


def gram_eigenvalues(gram: Tensor) -> Tensor:
    """Eigenvalues of a stack ``(stack, side, side)`` of Gram matrices, largest first, clamped at zero.

    Raises:
        UnsupportedOperationError: no solver returns eigenvalues with the trace and the norm of the matrix.
    """
    values = _eigenvalues(gram)
    right = _have_moments_of(gram, values)
    if not bool(right.all()):
        wrong = ~right.to(values.device)
        values[wrong] = _from_the_host(gram[wrong])
    return values.flip(-1).clamp_min(0.0)


# Up to this side, the threads of LAPACK cost more than they bring.
_LARGEST_DIVIDED_SIDE = 512


def are_divided(count: int, side: int) -> bool:
    """Whether the threads of the CPU take these matrices one by one, instead of sharing each of them."""
    threads = available_threads()
    return threads > 1 and (side <= _LARGEST_DIVIDED_SIDE or count >= threads)


def _eigenvalues(gram: Tensor) -> Tensor:
    """Eigenvalues, smallest first; on a CPU the matrices are divided among the threads."""
    if gram.device.type != "cpu" or not are_divided(len(gram), gram.shape[-1]):
        return _of_stack(gram)
    return torch.cat(over_threads(_of_stack, gram.tensor_split(max(1, min(available_threads(), len(gram))))))


def _of_stack(gram: Tensor) -> Tensor:
    try:
        values: Tensor = torch.linalg.eigvalsh(gram)
    except LinAlgError:
        values = torch.stack([_eigenvalues_of_one(matrix) for matrix in gram])
    return values


# Roundings, times the side, by which a backward stable solver may change the trace and the norm.
_ROUNDINGS = 8


def _have_moments_of(gram: Tensor, values: Tensor) -> Tensor:
    """Which rows of ``values`` have the trace and the Frobenius norm of their matrix, on the CPU; NaN has neither.

    The sums go to the host in one copy: on an accelerator that is fewer kernels than the comparison, and the solver
    has just waited there itself.
    """
    allowed = _ROUNDINGS * gram.shape[-1] * torch.finfo(gram.dtype).eps
    sums = values.sum(-1), gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    norms = torch.linalg.vector_norm(values, dim=-1), torch.linalg.vector_norm(gram, dim=(-2, -1))
    moments = torch.stack([sums[0], norms[0], sums[1], norms[1]]).cpu()
    found, expected = moments[:2], moments[2:]
    right: Tensor = ((found - expected).abs() <= allowed * expected).all(0)
    return right


def _from_the_host(gram: Tensor) -> Tensor:
    """Eigenvalues computed on the CPU, matrix by matrix, by the first solver whose result passes."""
    warnings.warn(
        f"torch.linalg.eigvalsh on {gram.device} returned values that are not the eigenvalues of {len(gram)} matrices "
        f"of side {gram.shape[-1]}: their sum or sum of squares is wrong. They were computed again on the CPU.",
        RuntimeWarning,
        stacklevel=2,
    )
    found = []
    for matrix in gram.cpu():
        tries = (solve(matrix) for solve in (_eigenvalues_of_one, lambda m: torch.linalg.svdvals(m).flip(-1)))
        good = (values for values in tries if bool(_have_moments_of(matrix, values)))
        values = next(good, None)
        if values is None:
            raise UnsupportedOperationError(
                f"Neither eigvalsh nor svdvals of torch {torch.__version__} on the CPU returns the eigenvalues of a "
                f"matrix of side {matrix.shape[-1]}: their sum or sum of squares is wrong. Run `rankscope selftest`."
            )
        found.append(values)
    return torch.stack(found).to(gram.device)


def _eigenvalues_of_one(gram: Tensor) -> Tensor:
    try:
        values: Tensor = torch.linalg.eigvalsh(gram)
    except LinAlgError:
        values = torch.linalg.svdvals(gram).flip(-1)
    return values


def is_lost_in_gram(singular_values: Tensor, rank: Tensor) -> Tensor:
    """Which spectra of a stack (largest first, ``rank`` of them nonzero by shape) extend too low for a Gram matrix."""
    last = (rank.to(torch.int64) - 1).clamp_min(0).unsqueeze(-1)
    return singular_values.gather(-1, last).squeeze(-1) < _RESOLVED_BY_GRAM * singular_values[..., 0]


def least_with_six_digits(dtype: torch.dtype) -> float:
    """Ratio to the largest below which a computed singular value has fewer than six correct digits."""
    known = 4 * torch.finfo(torch.float64).eps / 1e-6
    return known if is_wide(dtype) else known**0.5


def direct_singular_values(matrix: Tensor, otherwise: Tensor) -> Tensor:
    """Singular values of one matrix without its Gram matrix; ``otherwise`` (those from the Gram) if LAPACK fails."""
    try:
        if matrix.device.type == "cpu" and min(matrix.shape) <= _LARGEST_DIVIDED_SIDE:
            return torch.cat(over_threads(torch.linalg.svdvals, (matrix,)))
        values: Tensor = torch.linalg.svdvals(matrix)
    except LinAlgError:
        values = otherwise
    return values


def without_structural_zeros(values: Tensor, rank: Tensor) -> Tensor:
    """Set values beyond the rank that the shape allows, which are only rounding, to zero."""
    place = torch.arange(values.shape[-1], device=values.device)
    return values.masked_fill(place >= rank.unsqueeze(-1), 0.0)
