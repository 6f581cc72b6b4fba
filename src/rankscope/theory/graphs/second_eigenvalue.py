r"""The second eigenvalue of a mask of any size, part by part. Ours.

Number tokens so that each strongly connected part comes after what it sees: :math:`P_0` is block triangular and its
eigenvalues are those of its parts. A token alone gives its own share 1/degree; a part that sees more than itself
gives its largest eigenvalue; the one closed part gives 1 for the all-ones vector, and its second. With two closed parts
1 appears twice: they never agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.theory.graphs.bracket import Bracket
from rankscope.theory.graphs.connectivity import Connectivity
from rankscope.theory.graphs.intervals import Intervals, component_of
from rankscope.theory.graphs.parts import Mode, closed_part, dense_limit, open_part, reversible_operator

Floats = NDArray[np.float64]
TRIANGULAR = "exact: read from the diagonal"


@dataclass(frozen=True, eq=False)
class SecondEigenvalue:
    r"""Modulus of the second eigenvalue of :math:`P_0` and, where the slowest mode is known, its constant.

    Attributes:
        modulus: :math:`|\lambda_2|`.
        gap: :math:`1 - |\lambda_2|`, found without that subtraction where it is small.
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
    mask that averages exactly after some layers, are found in whole numbers. Where eigenvalues nearly meet, rounding
    takes their digits, and only ends are given.

    Args:
        sees: scipy csr array, entry (i, j) when i sees j; no row is empty.
        how: its connectivity.

    Example:
        >>> from scipy.sparse import csr_array
        >>> from rankscope.theory.graphs.connectivity import connectivity
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
    """The largest modulus; where that of another mode is not known and may be larger, only its ends."""
    top = max(modes, key=lambda mode: mode.modulus - mode.error)
    high = max(mode.modulus + mode.error for mode in modes)
    unsure = next((mode for mode in modes if mode.modulus + mode.error == high), top)
    if high <= top.modulus + top.error:
        return _of(top)
    return _of(Mode(top.modulus, top.gap, unsure.status, error=0.0), most=high)


def second_eigenvalue_of_intervals(graph: Intervals, *, listed: bool = False) -> SecondEigenvalue | None:
    r"""The same for masks whose pairs may be too many to list; None where it takes a list after all.

    Args:
        graph: the intervals.
        listed: whether the pairs can be listed; the iteration that does without is then left to those that cannot.

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
    """The largest share that a token alone in its part, and not the closed one, gives to itself."""
    alone = (sizes[how.labels] == 1) & (how.labels != how.closed[0])
    share = float(P.diagonal()[alone].max()) if alone.any() else 0.0
    return Mode(share, 1 - share, TRIANGULAR)


def _of(mode: Mode, most: float = 0.0) -> SecondEigenvalue:
    """``most``: as large as the modulus of another mode may be."""
    low, high = mode.modulus - mode.error, max(mode.modulus + mode.error, most)
    if low == high:
        return SecondEigenvalue(Bracket.exactly(mode.modulus, mode.status), mode.gap, mode.log_constant)
    return SecondEigenvalue(Bracket(low, high, mode.status), float("nan"))
