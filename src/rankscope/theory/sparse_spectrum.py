"""The second eigenvalue of a large sparse stochastic matrix; scipy is imported here and only on call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rankscope._errors import InputError, MissingExtraError
from rankscope.theory.stochastic import check_rows
from rankscope.theory.triangular import lower_second_mode


def sparse_second_mode(P0: Any) -> tuple[complex, Tensor, Tensor, str]:
    """Eigenvalue, right vector (centred), left vector and method for a scipy sparse P0 of any size.

    The diagonal where P0 is lower triangular. Otherwise Arnoldi iteration (ARPACK) on
    v -> C P0 v, which is slow to separate eigenvalues that lie close together and says so.

    Raises:
        MissingExtraError: scipy is not installed.
        InputError: P0 is not row-stochastic, or the iteration did not converge.
    """
    try:
        import numpy as np
        from scipy.sparse import csr_array
    except ImportError:
        raise MissingExtraError("The spectrum of a sparse matrix", "scipy", "graphs") from None
    P = csr_array(P0).astype(np.float64)
    eps = np.finfo(P0.dtype).eps if np.issubdtype(P0.dtype, np.floating) else 0.0
    sums = torch.from_numpy(np.asarray(P.sum(axis=1)).ravel())
    check_rows(sums, float(P.data.min()), float(8 * P.shape[0] * eps))
    rows, columns = P.nonzero()
    if bool((columns <= rows).all()):
        return _lower(P)
    return _iterated(P)


def _lower(P: Any) -> tuple[complex, Tensor, Tensor, str]:
    def reader(compressed: Any) -> Callable[[int, Tensor], Tensor]:
        data, places = torch.from_numpy(compressed.data), torch.from_numpy(compressed.indices).long()
        ends = compressed.indptr.tolist()
        return lambda i, v: data[ends[i] : ends[i + 1]] @ v[places[ends[i] : ends[i + 1]]]

    mode = lower_second_mode(torch.from_numpy(P.diagonal()), reader(P), reader(P.tocsc()))
    right = mode.right - mode.right.mean()
    return complex(mode.eigenvalue), _unit(right.numpy()), _unit(mode.left.numpy()), "triangular"


def _iterated(P: Any) -> tuple[complex, Tensor, Tensor, str]:
    import numpy as np
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigs

    def without_mean(v: Any) -> Any:
        return v - v.mean()

    shape = P.shape
    forward = LinearOperator(shape, matvec=lambda v: without_mean(P @ without_mean(np.ravel(v))), dtype=np.float64)
    backward = LinearOperator(shape, matvec=lambda v: without_mean(P.T @ without_mean(np.ravel(v))), dtype=np.float64)
    start = without_mean(np.random.default_rng(0).standard_normal(shape[0]))
    try:
        values, vectors = eigs(forward, k=4, which="LM", v0=start, ncv=80, maxiter=400)
        left_values, left_vectors = eigs(backward, k=4, which="LM", v0=start, ncv=80, maxiter=400)
    except ArpackError as error:
        raise InputError(
            f"The second eigenvalue of a sparse matrix of {shape[0]} tokens was not found: {error}. Its largest "
            "eigenvalues lie too close together; take fewer tokens, or a tensor of up to 2048."
        ) from error
    top = int(np.abs(values).argmax())
    same = int(np.abs(left_values - values[top]).argmin())
    return complex(values[top]), _unit(vectors[:, top]), _unit(left_vectors[:, same]), "arnoldi"


def _unit(vector: Any) -> Tensor:
    found = torch.from_numpy(vector).to(torch.complex128)
    norm: Tensor = torch.linalg.vector_norm(found)
    return found / norm
