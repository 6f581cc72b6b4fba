r"""The second eigenvalue of a mask of any size, component by component. Ours.

Number tokens so that each strongly connected part comes after what it sees: :math:`P_0` is block triangular and its
eigenvalues are those of its parts. A token alone gives its own share 1/degree; a part that sees more than itself
gives its largest eigenvalue; the one closed part gives 1 for the all-ones vector, and its second. With two closed parts
1 appears twice: they never agree.

A part of symmetric pattern is reversible: :math:`D^{1/2}PD^{-1/2}` is symmetric, D being the numbers of neighbours. Its
eigenvalues next to 1 are found through :math:`I - S`, factored, so that a gap of 1e-9 keeps seven digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.ext.theory.graphs.bracket import Bracket
from rankscope.ext.theory.graphs.connectivity import Connectivity

DENSE_TOKENS = 512
"""Number of tokens up to which a part is handled as a dense matrix."""
FACTOR_COST = 1 << 31
"""Largest tokens x bandwidth^2 for which a banded matrix is factored."""
SHIFT = 1e-12
POWERS = 200
BACKWARD = 8.0
"""Backward error of a dense eigenvalue, in machine epsilons of the Frobenius norm times the root of the size."""
ROOM = 4.0
"""Safety factor on the root of rounding by which coinciding eigenvalues may move."""
EXACT, WELL_KNOWN = 1e-9, 1e-6
"""Relative accuracies at which a modulus is called exact, and is reported as one number."""
MOST_EXACT = 1024
"""Layers in exact arithmetic after which a matrix is assumed not to average exactly."""
PRIMES = (2**31 - 1, 2**31 - 19)
ISOLATED = 0.01
"""Largest residual of a mode, relative to the gap, for which its vector and its constant are trusted."""
TRIANGULAR = "exact: read from the diagonal"
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SecondEigenvalue:
    r"""Modulus of the second eigenvalue of :math:`P_0`, or of the slowest mode of one part of it.

    Attributes:
        modulus: :math:`|\lambda_2|`.
        gap: :math:`1 - |\lambda_2|`, found without that subtraction if it is small; nan if only bounds are known.
        log_constant: log of c where late in depth random tokens have relative residual :math:`c|\lambda_2|^t`; nan
            where it was not found.
    """

    modulus: Bracket
    gap: float
    log_constant: float = math.nan


def _known(modulus: float, status: str, gap: float | None = None, log_constant: float = math.nan) -> SecondEigenvalue:
    return SecondEigenvalue(Bracket.exactly(modulus, status), 1 - modulus if gap is None else gap, log_constant)


def second_eigenvalue(sees: Any, how: Connectivity) -> SecondEigenvalue:
    r""":math:`|\lambda_2|` of attention that is uniform over what each token sees.

    **Exact** (to rounding) for parts of a few hundred tokens, tokens alone, and masks of symmetric pattern; otherwise
    an **Estimate** whose status gives its residual. 1 for a part in which all cycles have a common divisor, and 0 for a
    mask that averages exactly after some layers, are found in integer arithmetic. If eigenvalues nearly meet, rounding
    destroys their digits, and only an interval is given.

    Args:
        sees: scipy csr array, entry (i, j) when i sees j; no row is empty.
        how: its connectivity.

    Example:
        >>> from scipy.sparse import csr_array
        >>> from rankscope.ext.theory.graphs.connectivity import connectivity
        >>> causal = csr_array(np.tril(np.ones((9, 9))))
        >>> second_eigenvalue(causal, connectivity(causal)).modulus
        Bracket(lower=0.5, upper=0.5, status='exact: read from the diagonal')
    """
    if len(how.closed) > 1:
        return _known(1.0, f"exact: {len(how.closed)} parts see nothing outside themselves")
    P = uniform_over(sees)
    sizes = np.bincount(how.labels)
    modes = []
    for part in np.flatnonzero(sizes > 1):
        tokens = np.flatnonzero(how.labels == part)
        block = P[tokens][:, tokens].tocsr()
        modes.append(closed_part(block) if part == how.closed[0] else open_part(block))
    # tokens alone in their part give their own share, except in the closed part, where that is the eigenvalue 1
    alone = (sizes[how.labels] == 1) & (how.labels != how.closed[0])
    modes.append(_known(float(P.diagonal()[alone].max()) if alone.any() else 0.0, TRIANGULAR))
    return slowest(modes)


def slowest(modes: Sequence[SecondEigenvalue]) -> SecondEigenvalue:
    """The mode of largest modulus; only an interval if that of another is unknown and may be larger."""
    top = max(modes, key=lambda mode: mode.modulus.lower)
    widest = max(modes, key=lambda mode: mode.modulus.upper)
    if widest.modulus.upper <= top.modulus.upper:
        return top
    return SecondEigenvalue(Bracket(top.modulus.lower, widest.modulus.upper, widest.modulus.status), math.nan)


def uniform_over(sees: Any) -> Any:
    """Attention that is uniform over what each token sees: a scipy csr array whose rows sum to one."""
    return sees.astype(np.float64).multiply(1.0 / np.diff(sees.indptr)[:, None]).tocsr()


def open_part(P: Any) -> SecondEigenvalue:
    """Largest eigenvalue of a component that also sees tokens outside: below 1, real and simple (Perron)."""
    if P.shape[0] <= DENSE_TOKENS:
        return _conditioned(P.toarray())
    # Powers of a nonnegative matrix on a positive vector: its largest eigenvalue lies between the extreme ratios.
    v = np.ones(P.shape[0])
    for _ in range(POWERS):
        moved = P @ v + v  # adding the identity makes the largest eigenvalue the only one of its modulus
        ratios = moved / v - 1
        low, high = float(ratios.min()), float(ratios.max())
        if high - low <= 1e-12 * high:
            break
        v = moved / np.linalg.norm(moved)
    return _known(high, f"iterated, at least {low:.9g} and at most {high:.9g}")


def closed_part(P: Any) -> SecondEigenvalue:
    """Second eigenvalue of a component that sees only itself."""
    tokens = P.shape[0]
    rounds = period(P)
    if rounds > 1:
        return _known(1.0, f"exact: every cycle is a multiple of {rounds} long")
    pattern = P.astype(bool)
    degrees = np.diff(P.indptr).astype(np.float64)
    uniform = bool(np.allclose(P.data, np.repeat(1 / degrees, np.diff(P.indptr)), rtol=1e-12, atol=0))
    if uniform and (pattern != pattern.T).nnz == 0:
        return _reversible(P, degrees)
    mode = _conditioned(P.toarray() - P.toarray().mean(axis=0)) if tokens <= DENSE_TOKENS else None
    if mode is not None and mode.modulus.is_known:
        return mode
    # a matrix that averages exactly after some layers has only eigenvalues 0, whose digits rounding destroys
    layers = equal_after(P, min(tokens, MOST_EXACT)) if uniform else None
    if layers is not None:
        return _known(0.0, f"exact: equal rows after {layers} layers")
    return mode if mode is not None else _iterated(P)


def period(P: Any) -> int:
    """Greatest common divisor of the lengths of all cycles of a strongly connected component. **Exact**.

    Above 1, the eigenvalues of modulus 1 are the roots of unity of that order: differences circulate and never decay.

    Example:
        >>> from scipy.sparse import csr_array
        >>> period(csr_array(np.roll(np.eye(3), 1, axis=1))), period(csr_array(np.ones((2, 2))))
        (3, 1)
    """
    from scipy.sparse.csgraph import dijkstra

    if P.diagonal().any():
        return 1
    layers = dijkstra(P.astype(bool).astype(np.float64), indices=0, unweighted=True).astype(np.int64)
    rows, columns = P.nonzero()
    return int(np.gcd.reduce(layers[rows] + 1 - layers[columns]))


def equal_after(sees: Any, most: int) -> int | None:
    """The fewest layers after which uniform attention over what tokens see has all rows equal; None within ``most``.

    **Exact**, in arithmetic modulo two primes on eight random vectors: unequal rows differ except with probability
    1e-70, and equal rows never differ. Each layer is a sum over what a token sees, divided by the number of terms.

    Args:
        sees: scipy csr array whose pattern is the mask; no row is empty, and no row is longer than 2^31.
        most: number of layers to try.

    Example:
        Each of 4 tokens sees two that between them see all.

        >>> from scipy.sparse import csr_array
        >>> equal_after(csr_array(np.array([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]])), 9)
        2
    """
    pattern = sees.astype(bool).astype(np.int64)
    counts, places = np.unique(np.diff(sees.indptr), return_inverse=True)
    random = np.random.default_rng(0)
    longest = 0
    for prime in np.repeat(PRIMES, 4).tolist():
        shares = np.array([pow(int(count), -1, prime) for count in counts], dtype=np.int64)[places]
        held = random.integers(0, prime, size=len(places))
        for layers in range(most + 1):
            if (held == held[0]).all():
                longest = max(longest, layers)
                break
            held = pattern @ held % prime * shares % prime
        else:
            return None  # one vector proves it: values that are equal stay equal
    return longest


def _conditioned(A: Floats) -> SecondEigenvalue:
    """Largest modulus of an eigenvalue, and how much rounding may have changed it.

    A backward error of LAPACK's size moves an eigenvalue by that over the cosine between its left and right vectors.
    If eigenvalues coincide, the cosine is zero up to rounding and digits are lost: eigenvalue 0 of a nilpotent matrix
    of index k appears as the k-th root of rounding.
    """
    from scipy.linalg import eig

    values, left, right = eig(A, left=True, right=True)
    cosines = np.abs((left.conj() * right).sum(0)) / (np.linalg.norm(left, axis=0) * np.linalg.norm(right, axis=0))
    size = BACKWARD * math.sqrt(len(A)) * np.finfo(float).eps * np.linalg.norm(A)
    errors = size / np.maximum(cosines, np.finfo(float).tiny)
    # if eigenvalues coincide, first order says nothing: they move by a root whose degree is at most their number
    meeting = int((errors > WELL_KNOWN).sum())
    if meeting:
        norm = np.linalg.norm(A, 2)
        errors = np.minimum(errors, ROOM * (2 * norm) ** (1 - 1 / meeting) * size ** (1 / meeting))
    moduli = np.abs(values)
    low, high = float(np.maximum(moduli - errors, 0.0).max()), float(np.minimum(moduli + errors, 1.0).max())
    top = float(moduli.max())
    if high - low <= WELL_KNOWN * top:
        return _known(top, "exact: dense" if high - low <= EXACT * top else f"dense, within {high - low:.0e}")
    status = f"dense, eigenvalues that nearly meet: at least {low:.6g} and at most {high:.6g}"
    return SecondEigenvalue(Bracket(low, high, status), math.nan)


def _reversible(P: Any, degrees: Floats) -> SecondEigenvalue:
    r"""Second eigenvalue of a part of symmetric pattern, through :math:`S = D^{1/2}PD^{-1/2}`.

    Dense if it is small, by shift and invert next to 0 of :math:`I - S` if that is a narrow band, else by Lanczos
    iteration.
    """
    from scipy.sparse import csc_array, diags_array
    from scipy.sparse.linalg import eigsh, splu

    tokens, root = P.shape[0], np.sqrt(degrees)
    fixed = root / np.linalg.norm(root)
    if tokens <= DENSE_TOKENS:
        S = root[:, None] * P.toarray() / root
        values, vectors = np.linalg.eigh((S + S.T) / 2 - np.outer(fixed, fixed))
        top = int(np.abs(values).argmax())
        modulus = float(abs(values[top]))
        # indistinguishable from rounding means zero: all rows are equal
        modulus = 0.0 if modulus <= 8 * np.finfo(float).eps else modulus
        constant = _log_constant(vectors[:, top], root) if modulus > 0 else math.nan
        return _known(modulus, "exact: dense symmetric", log_constant=constant)
    rows, columns = P.nonzero()
    bandwidth = int(np.abs(rows.astype(np.int64) - columns).max())
    if tokens * bandwidth**2 <= FACTOR_COST:
        S = csc_array(diags_array(root) @ P @ diags_array(1 / root))
        laplacian = csc_array(diags_array(np.ones(tokens)) - (S + S.T) / 2)
        solver = splu(
            csc_array(laplacian + diags_array(np.full(tokens, SHIFT))),
            permc_spec="MMD_AT_PLUS_A",
            options={"SymmetricMode": True},
        )
        inverse = _operator(lambda v: _without(solver.solve(_without(v, fixed)), fixed), tokens)
        values, vectors = eigsh(inverse, k=2, which="LM", v0=_start(fixed), tol=1e-10)
        vector = vectors[:, int(values.argmax())]
        gap = float(vector @ (laplacian @ vector))
        # no eigenvalue near -1 is larger in modulus: none lies below -1 + 2 (least share a token gives itself)
        if 1 - 2 * float(P.diagonal().min()) < 1 - gap:
            return _known(1 - gap, "exact: factored", gap, _log_constant(vector, root))
    return _iterated(P, degrees)


def _iterated(P: Any, degrees: Floats | None = None) -> SecondEigenvalue:
    """The second eigenvalue by Lanczos iteration of a reversible part, or by Arnoldi iteration of any other.

    In directed random graphs many eigenvalues lie close together at the edge of a disc, and none converges far: the
    tolerance is loosened until one does, and the value is then an estimate, given with its backward error.

    Args:
        P: the part.
        degrees: numbers of neighbours of a reversible part; None for any other.
    """
    from scipy.sparse.linalg import ArpackNoConvergence, eigs, eigsh

    tokens = P.shape[0]
    root = np.ones(tokens) if degrees is None else np.sqrt(degrees)
    fixed = root / np.linalg.norm(root)

    def moved(v: Floats) -> Floats:
        return _without(root * (P @ (_without(np.ravel(v), fixed) / root)), fixed)

    operator, start = _operator(moved, tokens), _start(fixed)
    if np.linalg.norm(moved(start)) <= 8 * np.finfo(float).eps * np.linalg.norm(start):
        return _known(0.0, "exact: equal rows")
    solve, tight = (eigs, 1e-6) if degrees is None else (eigsh, 1e-7)
    for tolerance in (tight, 1e-3, 1e-1, 1.0):
        try:
            values, vectors = solve(operator, 1, v0=start, ncv=min(60, tokens), tol=tolerance, maxiter=20)
            break
        except ArpackNoConvergence:
            continue
    else:
        return SecondEigenvalue(Bracket(0.0, 1.0, "unknown: the iteration found no eigenvalue"), math.nan)
    modulus, vector = float(abs(values[0])), vectors[:, 0]
    miss = float(np.linalg.norm(moved(vector.real) + 1j * moved(vector.imag) - values[0] * vector))
    if degrees is None or tolerance > tight:
        return _known(modulus, f"estimate: iterated, relative backward error {miss / modulus:.0e}")
    constant = _log_constant(vector, root) if miss <= ISOLATED * (1 - modulus) else math.nan
    return _known(modulus, f"iterated, an eigenvalue within {miss:.0e}", log_constant=constant)


def _operator(apply: Callable[[Floats], Floats], tokens: int) -> Any:
    from scipy.sparse.linalg import LinearOperator

    return LinearOperator((tokens, tokens), matvec=apply, dtype=np.float64)


def _start(fixed: Floats) -> Floats:
    """A random vector without the part along the eigenvector that is known."""
    return _without(np.random.default_rng(0).standard_normal(len(fixed)), fixed)


def _without(v: Floats, unit: Floats) -> Floats:
    return v - unit * float(unit @ v)


def _log_constant(s: Floats, root: Floats) -> float:
    r"""Log of c in the late relative residual of iid tokens, :math:`c\lambda_2^t`, for the symmetric eigenvector s.

    P^t is 1 pi^T plus lambda^t v l^T with v = s/root, l = s root (l^T v = 1 for a unit s), pi = root^2/sum root^2; for
    iid tokens the expected squares are |v|^2|l|^2 lambda^2t against n|pi|^2.
    """
    unit = s / np.linalg.norm(s)
    pi = root**2 / (root**2).sum()
    mode = np.linalg.norm(unit / root - (unit / root).mean()) * np.linalg.norm(unit * root)
    return float(math.log(mode) - 0.5 * math.log(len(s)) - math.log(np.linalg.norm(pi)))
