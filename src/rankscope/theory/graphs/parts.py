r"""The slowest mode of one strongly connected part of a mask, by whichever way suits its size and pattern.

A part of symmetric pattern is reversible: :math:`D^{1/2}PD^{-1/2}` is symmetric, D being the numbers of neighbours. Its
eigenvalues next to 1 are found through :math:`I - S`, factored, so that a gap of 1e-9 keeps seven digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DENSE_TOKENS = 512
FACTOR_COST = 1 << 31
"""Largest tokens x bandwidth^2 for which a banded matrix is factored."""
SHIFT = 1e-12
POWERS = 200
ISOLATED = 0.01
"""Part of the gap that the residual of a mode may be for its vector, and so its constant, to be believed."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Mode:
    """Modulus, gap to 1, how they were found, and the log constant of the mode for random tokens (nan: not found)."""

    modulus: float
    gap: float
    status: str
    log_constant: float = math.nan


def dense_limit() -> int:
    """Tokens up to which a part is handled as a dense matrix."""
    return DENSE_TOKENS


def open_part(P: Any) -> Mode:
    """Largest eigenvalue of a part that also sees tokens outside: below 1, real and simple (Perron)."""
    if P.shape[0] <= DENSE_TOKENS:
        top = float(np.abs(np.linalg.eigvals(P.toarray())).max())
        return Mode(top, 1 - top, "exact: dense")
    return _perron(P)


def _perron(P: Any) -> Mode:
    """Powers of a nonnegative matrix on a positive vector: its largest eigenvalue lies between the extreme ratios."""
    v = np.ones(P.shape[0])
    for _ in range(POWERS):
        moved = P @ v + v  # with the identity added no eigenvalue but the largest has its modulus
        ratios = moved / v - 1
        low, high = float(ratios.min()), float(ratios.max())
        if high - low <= 1e-12 * high:
            break
        v = moved / np.linalg.norm(moved)
    return Mode(high, 1 - high, f"iterated, at least {low:.9g} and at most {high:.9g}")


def closed_part(P: Any) -> Mode:
    """Second eigenvalue of a part that sees only itself."""
    tokens = P.shape[0]
    pattern = P.astype(bool)
    degrees = np.diff(P.indptr).astype(np.float64)
    uniform = bool(np.allclose(P.data, np.repeat(1 / degrees, np.diff(P.indptr)), rtol=1e-12, atol=0))
    reversible = uniform and (pattern != pattern.T).nnz == 0
    if tokens <= DENSE_TOKENS:
        return _dense(P.toarray(), degrees if reversible else None)
    rows, columns = P.nonzero()
    bandwidth = int(np.abs(rows.astype(np.int64) - columns).max())
    if reversible and tokens * bandwidth**2 <= FACTOR_COST:
        return _factored(P, degrees)
    if reversible:
        return reversible_operator(lambda v: P @ v, degrees)
    return _restarted(lambda v: _centred(P @ _centred(v)), tokens)


def _dense(P: Floats, degrees: Floats | None) -> Mode:
    if degrees is None:
        values = np.abs(np.linalg.eigvals(P - P.mean(axis=0)))
        return Mode(float(values.max()), 1 - float(values.max()), "exact: dense")
    root = np.sqrt(degrees)
    fixed = root / np.linalg.norm(root)
    symmetric = root[:, None] * P / root
    values, vectors = np.linalg.eigh((symmetric + symmetric.T) / 2 - np.outer(fixed, fixed))
    top = int(np.abs(values).argmax())
    modulus = float(abs(values[top]))
    # what is not distinguishable from rounding is zero: all rows are equal
    modulus = 0.0 if modulus <= 8 * np.finfo(float).eps else modulus
    constant = _log_constant(vectors[:, top], root) if modulus > 0 else math.nan
    return Mode(modulus, 1 - modulus, "exact: dense symmetric", constant)


def _factored(P: Any, degrees: Floats) -> Mode:
    """The eigenvalues of I - S next to 0, by shift and invert."""
    from scipy.sparse import csc_array, dia_array
    from scipy.sparse.linalg import LinearOperator, eigsh, splu

    tokens, root = P.shape[0], np.sqrt(degrees)

    def diagonal(entries: Floats) -> Any:
        return csc_array(dia_array((entries[None], [0]), shape=(tokens, tokens)))

    S = diagonal(root) @ P @ diagonal(1 / root)
    laplacian = (diagonal(np.ones(tokens)) - (S + S.T) / 2).tocsc()
    shifted = (laplacian + diagonal(np.full(tokens, SHIFT))).tocsc()
    solver = splu(shifted, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
    inverse = LinearOperator(
        (tokens, tokens), matvec=lambda v: _without(solver.solve(_without(v, root)), root), dtype=np.float64
    )
    start = np.random.default_rng(0).standard_normal(tokens)
    values, vectors = eigsh(inverse, k=2, which="LM", v0=_without(start, root), tol=1e-10)
    top = int(values.argmax())
    vector = vectors[:, top]
    gap = float(vector @ (laplacian @ vector))
    return _checked_below(Mode(1 - gap, gap, "exact: factored", _log_constant(vector, root)), P)


def reversible_operator(apply: Callable[[Floats], Floats], degrees: Floats, restarts: int = 20) -> Mode:
    """The same where the matrix is only applied: Lanczos iteration, stopped at a residual of 1e-7."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    tokens, root = len(degrees), np.sqrt(degrees)

    def moved(v: Floats) -> Floats:
        return _without(root * apply(_without(np.ravel(v), root) / root), root)

    operator = LinearOperator((tokens, tokens), matvec=moved, dtype=np.float64)
    start = _without(np.random.default_rng(0).standard_normal(tokens), root)
    if np.linalg.norm(moved(start)) <= 8 * np.finfo(float).eps * np.linalg.norm(start):
        return Mode(0.0, 1.0, "exact: equal rows")
    try:
        values, vectors = eigsh(operator, k=1, which="LM", v0=start, ncv=min(60, tokens), tol=1e-7, maxiter=restarts)
    except ArpackNoConvergence:
        return _restarted(moved, tokens)
    vector = vectors[:, 0]
    value = float(abs(values[0]))
    miss = float(np.linalg.norm(moved(vector) - values[0] * vector))
    constant = _log_constant(vector, root) if miss <= ISOLATED * (1 - value) else math.nan
    return Mode(value, 1 - value, f"iterated, an eigenvalue within {miss:.0e}", constant)


def _restarted(apply: Callable[[Floats], Floats], tokens: int) -> Mode:
    """Arnoldi iteration that keeps its best vector; ends with an estimate, however close eigenvalues lie."""
    import torch

    from rankscope.theory.stability import stability_factor

    def one_column(R: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(apply(R[:, 0].numpy())).unsqueeze(1)

    found = stability_factor(one_column, tokens, 1, krylov=50, restarts=8, tolerance=1e-6)
    status = f"estimate: iterated, relative backward error {found.backward_error:.0e}"
    return Mode(found.factor, 1 - found.factor, status)


def _checked_below(mode: Mode, P: Any) -> Mode:
    """Whether no eigenvalue near -1 is larger in modulus: none lies below -1 + 2 (least share a token gives itself)."""
    if 1 - 2 * float(P.diagonal().min()) < mode.modulus:
        return mode
    degrees = np.diff(P.indptr).astype(np.float64)
    return reversible_operator(lambda v: P @ v, degrees)


def _log_constant(s: Floats, root: Floats) -> float:
    r"""Log of c in the late relative residual of iid tokens, :math:`c\lambda_2^t`, for the symmetric eigenvector s.

    P^t is 1 pi^T plus lambda^t v l^T with v = s/root, l = s root (l^T v = 1 for a unit s), pi = root^2/sum root^2; for
    iid tokens the expected squares are |v|^2|l|^2 lambda^2t against n|pi|^2.
    """
    unit = s / np.linalg.norm(s)
    pi = root**2 / (root**2).sum()
    mode = np.linalg.norm(unit / root - (unit / root).mean()) * np.linalg.norm(unit * root)
    return float(math.log(mode) - 0.5 * math.log(len(s)) - math.log(np.linalg.norm(pi)))


def _without(v: Floats, root: Floats) -> Floats:
    return v - root * (float(root @ v) / float(root @ root))


def _centred(v: Floats) -> Floats:
    centred: Floats = v - v.mean()
    return centred
