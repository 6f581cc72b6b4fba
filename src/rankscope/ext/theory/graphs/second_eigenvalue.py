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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.ext.theory.graphs.bracket import Bracket
from rankscope.ext.theory.graphs.connectivity import Connectivity
from rankscope.ext.theory.graphs.intervals import Intervals, component_of

DENSE_TOKENS = 512
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
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Mode:
    """The slowest mode of a part.

    Attributes:
        modulus: of its eigenvalue.
        gap: distance of the modulus to 1, found without subtraction if that would cost digits.
        status: how they were found.
        log_constant: log constant of the mode for random tokens; nan if it was not found.
        error: how much rounding may have changed the modulus; 0 if that is below one part in 1e6.
    """

    modulus: float
    gap: float
    status: str
    log_constant: float = math.nan
    error: float = 0.0


def dense_limit() -> int:
    """Number of tokens up to which a component is handled as a dense matrix."""
    return DENSE_TOKENS


def open_part(P: Any) -> Mode:
    """Largest eigenvalue of a component that also sees tokens outside: below 1, real and simple (Perron)."""
    if P.shape[0] <= DENSE_TOKENS:
        return _conditioned(P.toarray())
    return _perron(P)


def _perron(P: Any) -> Mode:
    """Powers of a nonnegative matrix on a positive vector: its largest eigenvalue lies between the extreme ratios."""
    v = np.ones(P.shape[0])
    for _ in range(POWERS):
        moved = P @ v + v  # adding the identity makes the largest eigenvalue the only one of its modulus
        ratios = moved / v - 1
        low, high = float(ratios.min()), float(ratios.max())
        if high - low <= 1e-12 * high:
            break
        v = moved / np.linalg.norm(moved)
    return Mode(high, 1 - high, f"iterated, at least {low:.9g} and at most {high:.9g}")


def closed_part(P: Any) -> Mode:
    """Second eigenvalue of a component that sees only itself."""
    tokens = P.shape[0]
    rounds = period(P)
    if rounds > 1:
        return Mode(1.0, 0.0, f"exact: every cycle is a multiple of {rounds} long")
    pattern = P.astype(bool)
    degrees = np.diff(P.indptr).astype(np.float64)
    uniform = bool(np.allclose(P.data, np.repeat(1 / degrees, np.diff(P.indptr)), rtol=1e-12, atol=0))
    reversible = uniform and (pattern != pattern.T).nnz == 0
    if tokens <= DENSE_TOKENS and reversible:
        return _dense(P.toarray(), degrees)
    if not reversible:
        mode = _conditioned(P.toarray() - P.toarray().mean(axis=0)) if tokens <= DENSE_TOKENS else None
        if mode is not None and not mode.error:
            return mode
        # a matrix that averages exactly after some layers has only eigenvalues 0, whose digits rounding destroys
        layers = equal_after(P, min(tokens, MOST_EXACT)) if uniform else None
        if layers is not None:
            return Mode(0.0, 1.0, f"exact: equal rows after {layers} layers")
        return mode if mode is not None else _restarted(lambda v: _centred(P @ _centred(v)), tokens)
    rows, columns = P.nonzero()
    bandwidth = int(np.abs(rows.astype(np.int64) - columns).max())
    if tokens * bandwidth**2 <= FACTOR_COST:
        return _factored(P, degrees)
    return reversible_operator(lambda v: P @ v, degrees)


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


def _conditioned(A: Floats) -> Mode:
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
        return Mode(top, 1 - top, "exact: dense" if high - low <= EXACT * top else f"dense, within {high - low:.0e}")
    half = (high - low) / 2
    status = f"dense, eigenvalues that nearly meet: at least {low:.6g} and at most {high:.6g}"
    return Mode((low + high) / 2, 1 - (low + high) / 2, status, error=half)


def _dense(P: Floats, degrees: Floats) -> Mode:
    root = np.sqrt(degrees)
    fixed = root / np.linalg.norm(root)
    symmetric = root[:, None] * P / root
    values, vectors = np.linalg.eigh((symmetric + symmetric.T) / 2 - np.outer(fixed, fixed))
    top = int(np.abs(values).argmax())
    modulus = float(abs(values[top]))
    # indistinguishable from rounding means zero: all rows are equal
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
    """The same for a matrix that is only applied: Lanczos iteration, stopped at a residual of 1e-7."""
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
    """Arnoldi iteration that keeps its best vector; returns an estimate, however close the eigenvalues are."""
    import torch

    from rankscope.ext.theory.stability import stability_factor

    def one_column(R: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(apply(R[:, 0].numpy())).unsqueeze(1)

    factor = stability_factor(one_column, tokens, 1, krylov=50, restarts=8, tolerance=1e-6)
    status = f"estimate: iterated, relative backward error {factor.backward_error:.0e}"
    return Mode(factor.factor, 1 - factor.factor, status)


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


TRIANGULAR = "exact: read from the diagonal"


@dataclass(frozen=True, eq=False)
class SecondEigenvalue:
    r"""Modulus of the second eigenvalue of :math:`P_0` and, if the slowest mode is known, its constant.

    Attributes:
        modulus: :math:`|\lambda_2|`.
        gap: :math:`1 - |\lambda_2|`, found without that subtraction if it is small.
        log_constant: log of c where late in depth random tokens have relative residual :math:`c|\lambda_2|^t`; nan
            where it was not found.
    """

    modulus: Bracket
    gap: float
    log_constant: float = float("nan")


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
        return _of(Mode(1.0, 0.0, f"exact: {len(how.closed)} parts see nothing outside themselves"))
    P = sees.astype(np.float64)
    P = P.multiply(1.0 / np.diff(sees.indptr)[:, None]).tocsr()
    sizes = np.bincount(how.labels)
    modes = []
    for part in np.flatnonzero(sizes > 1):
        tokens = np.flatnonzero(how.labels == part)
        block = P[tokens][:, tokens].tocsr()
        modes.append(closed_part(block) if part == how.closed[0] else open_part(block))
    return _slowest([*modes, _alone(P, how, sizes)])


def _slowest(modes: list[Mode]) -> SecondEigenvalue:
    """The largest modulus; only an interval if that of another mode is unknown and may be larger."""
    top = max(modes, key=lambda mode: mode.modulus - mode.error)
    high = max(mode.modulus + mode.error for mode in modes)
    unsure = next((mode for mode in modes if mode.modulus + mode.error == high), top)
    if high <= top.modulus + top.error:
        return _of(top)
    return _of(Mode(top.modulus, top.gap, unsure.status, error=0.0), most=high)


def second_eigenvalue_of_intervals(graph: Intervals, *, listed: bool = False) -> SecondEigenvalue | None:
    r"""The same for masks with too many pairs to list; None if the pairs are needed after all.

    Args:
        graph: the intervals.
        listed: whether the pairs can be listed; the iteration without a list is used only if they cannot.

    Example:
        >>> own = np.arange(10**6)
        >>> second_eigenvalue_of_intervals(Intervals(0 * own, own + 1)).gap
        0.5
    """
    lengths = graph.lengths
    if graph.is_triangular:
        second = float(1 / lengths[1:].min()) if graph.tokens > 1 else 0.0
        return _of(Mode(second, 1 - second, TRIANGULAR))
    if graph.is_complete:
        return _of(Mode(0.0, 1.0, "exact: equal rows"))
    labels = component_of(graph)
    sizes = np.bincount(labels)
    first = int(sizes[0])
    if (sizes[1:] == 1).all() and (graph.start[:first] == 0).all() and (graph.stop[:first] == first).all():
        rest = lengths[first:]
        second = float(1 / rest.min()) if len(rest) else 0.0
        return _of(Mode(second, 1 - second, "exact: a complete part and tokens alone"))
    if listed or len(sizes) > 1 or not _is_symmetric(graph) or graph.tokens <= dense_limit():
        return None
    return _of(reversible_operator(graph.mean_over_seen, lengths.astype(np.float64), restarts=60))


def _is_symmetric(graph: Intervals) -> bool:
    """Whether i sees j exactly when j sees i: the last that sees i is the last that i sees, and so for the first."""
    own = np.arange(graph.tokens)
    last = np.searchsorted(graph.start, own, side="right")
    first = np.searchsorted(graph.stop, own, side="right")
    return bool((last == graph.stop).all() and (first == graph.start).all())


def _alone(P: Any, how: Connectivity, sizes: NDArray[np.int64]) -> Mode:
    """The largest share that a token alone in its component, which is not the closed one, gives to itself."""
    alone = (sizes[how.labels] == 1) & (how.labels != how.closed[0])
    share = float(P.diagonal()[alone].max()) if alone.any() else 0.0
    return Mode(share, 1 - share, TRIANGULAR)


def _of(mode: Mode, most: float = 0.0) -> SecondEigenvalue:
    """``most`` is an upper bound on the modulus of the other modes."""
    low, high = mode.modulus - mode.error, max(mode.modulus + mode.error, most)
    if low == high:
        return SecondEigenvalue(Bracket.exactly(mode.modulus, mode.status), mode.gap, mode.log_constant)
    return SecondEigenvalue(Bracket(low, high, mode.status), float("nan"))
