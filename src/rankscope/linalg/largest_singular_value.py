r"""Largest singular value of a matrix A that can only be applied, with an interval that contains it.

Block Lanczos on :math:`A^TA` with full reorthogonalisation and thick restarts. Let Q be the basis,
:math:`H = A^TAQ`, :math:`T = Q^TH` with largest eigenvalue :math:`\theta`, :math:`R = H - QT`, and
:math:`\tau = \|A\|_F^2 - \mathrm{tr}\,T` the energy outside the basis. The squared singular value is bounded

- from below by :math:`\theta`, and half a step further by the largest eigenvalue of :math:`HT^{-1}H^T`, the Ritz value
  of :math:`AA^T` on the span of AQ;
- from above by the norm of :math:`\begin{pmatrix}\theta & \|R\|_2\\ \|R\|_2 & \tau\end{pmatrix}`, because the norm of a
  matrix is at most that of the matrix of its blocks' norms, and by any bound that the caller provides.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Normal = Callable[[Sequence[int], Float[Tensor, "some side block"]], Float[Tensor, "some side block"]]

_MOST_COLUMNS = 96
_KEPT_COLUMNS = 24
_LEAST_STEPS = 8
_TELLING = 1e-2
"""Ritz values below this fraction of the largest do not affect it, and dividing by them would amplify rounding."""


@dataclass(frozen=True)
class SingularValue:
    """A largest singular value.

    Attributes:
        lower: lower **Bound**, up to rounding; the value itself if ``is_estimate`` is False.
        upper: upper **Bound**, up to rounding.
        is_estimate: True if neither the interval closed nor the iterations converged.
        passes: how often A^T A was applied.
    """

    lower: float
    upper: float
    is_estimate: bool
    passes: int


def largest_singular_values(
    normal: Normal,
    start: Float[Tensor, "matrices side block"],
    image: Float[Tensor, "matrices side block"],
    energy: Sequence[float],
    *,
    upper: Sequence[float],
    passes: int,
    tolerance: float,
) -> list[SingularValue]:
    """Iterate until each value is known to ``tolerance``, or ``passes`` are used up.

    An iteration has converged if the interval is closed to the relative ``tolerance``; or if the basis is invariant;
    or if, after at least eight steps from a start that should include a random direction, the residual of the top Ritz
    pair is below ``tolerance`` times its value. Each matrix has its own iteration; only ``normal`` is applied to all
    matrices that still iterate, together.

    Args:
        normal: maps the numbers of some matrices and a stack Z to a stack of A^T A Z, in float64.
        start: orthonormal columns.
        image: A^T A times ``start``, which counts as the first pass.
        energy: sum of squares of each A.
        upper: any upper bounds, or inf.
        passes: maximum number of applications.
        tolerance: relative tolerance.

    Example:
        >>> A = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
        >>> Z = torch.eye(3, dtype=torch.float64)[None, :, :2]
        >>> [found] = largest_singular_values(
        ...     lambda numbers, X: A.T @ A @ X, Z, A.T @ A @ Z, [14.0], upper=[9.0], passes=1, tolerance=1e-12
        ... )
        >>> found.lower, found.upper, found.is_estimate
        (3.0, 3.0, False)
    """
    given = zip(start, image, energy, upper, strict=True)
    iterations = [_iteration(*one, passes, tolerance) for one in given]
    found: dict[int, SingularValue] = {}
    waiting: dict[int, Tensor] = {}

    def go_on(number: int, image: Tensor | None) -> None:
        try:
            waiting[number] = iterations[number].send(image)  # type: ignore[arg-type]
        except StopIteration as end:
            found[number] = end.value

    for number in range(len(iterations)):
        go_on(number, None)
    while waiting:
        blocks, waiting = waiting, {}
        widest = max(block.shape[1] for block in blocks.values())
        padded = [torch.nn.functional.pad(block, (0, widest - block.shape[1])) for block in blocks.values()]
        for (number, block), seen in zip(blocks.items(), normal(list(blocks), torch.stack(padded)), strict=True):
            go_on(number, seen[:, : block.shape[1]])
    return [found[number] for number in range(len(iterations))]


def _iteration(
    Q: Tensor, H: Tensor, energy: float, upper: float, passes: int, tolerance: float
) -> Generator[Tensor, Tensor, SingularValue]:
    """Block Lanczos of one matrix: yields blocks and is sent their images."""
    new, taken, lower = Q.shape[1], 1, 0.0
    while True:
        ritz = _Ritz(Q, H, energy)
        lower, upper = max(lower, ritz.lower), min(upper, ritz.upper)
        closed = upper - lower <= tolerance * upper
        settled = taken >= _LEAST_STEPS and ritz.miss <= tolerance * ritz.values[-1]
        if closed or settled or taken >= passes:
            return SingularValue(lower, max(lower, upper), not (closed or settled), taken)
        block = _next_block(Q, H, new, tolerance)
        if block.shape[1] == 0:
            return SingularValue(lower, max(lower, upper), False, taken)
        if Q.shape[1] + block.shape[1] > _MOST_COLUMNS:
            # Thick restart: keep the top Ritz vectors, and their images by linearity, without applying A again.
            top = ritz.vectors[:, -_KEPT_COLUMNS:]
            Q, H = Q @ top, H @ top
        taken, new = taken + 1, block.shape[1]
        Q, H = torch.cat([Q, block], 1), torch.cat([H, (yield block)], 1)


def singular_value_within(
    gram: Float[Tensor, "block block"], energy: float, upper: float, *, tolerance: float
) -> SingularValue:
    r"""Bounds from a single product AZ with orthonormal columns Z, given its Gram matrix.

    The largest eigenvalue of :math:`(AZ)^TAZ` is a lower bound on :math:`s_1^2`. Adding the energy outside the span,
    :math:`\|A\|_F^2 - \|AZ\|_F^2`, gives an upper bound.
    """
    theta = _largest_eigenvalue(gram)
    lower, upper = theta**0.5, min(upper, (theta + max(0.0, energy - float(gram.trace()))) ** 0.5)
    return SingularValue(lower, max(lower, upper), not upper - lower <= tolerance * upper, 1)


class _Ritz:
    """The bounds on the largest singular value that follow from a basis."""

    def __init__(self, Q: Tensor, H: Tensor, energy: float) -> None:
        T = Q.T @ H
        T = (T + T.T) / 2
        self.values, self.vectors = torch.linalg.eigh(T)
        residual = H - Q @ T
        theta = max(0.0, float(self.values[-1]))
        self.miss = float(torch.linalg.vector_norm(residual @ self.vectors[:, -1]))
        tail = max(0.0, energy - float(T.trace()))
        rho = _largest_eigenvalue(residual.T @ residual) ** 0.5
        # The larger eigenvalue of [[theta, rho], [rho, tail]].
        above = (theta + tail) / 2 + (((theta - tail) / 2) ** 2 + rho**2) ** 0.5
        telling = self.values > _TELLING * theta
        # H V diag(1/sqrt(values)) is A^T times an orthonormal basis of AQ: its Gram matrix is half a step further on.
        half = H @ self.vectors[:, telling] / self.values[telling].sqrt()
        gram = half.T @ half
        further = _largest_eigenvalue(gram) if gram.numel() else 0.0
        above = min(above, further + max(0.0, energy - float(gram.trace())))
        self.lower, self.upper = max(theta, further) ** 0.5, above**0.5


def _largest_eigenvalue(gram: Tensor) -> float:
    return max(0.0, float(torch.linalg.eigvalsh(gram)[-1]))


def _next_block(Q: Tensor, H: Tensor, new: int, tolerance: float) -> Tensor:
    """Orthonormal basis of the part of the latest images outside Q; empty if only rounding is left."""
    block = H[:, -new:]
    size = float(torch.linalg.vector_norm(block, dim=0).amax())
    # One Gram-Schmidt pass leaves components of rounding size along Q; a second one removes them.
    for _ in range(2):
        block = block - Q @ (Q.T @ block)
    left, lengths, _ = torch.linalg.svd(block, full_matrices=False)
    block = left[:, lengths > 1e-3 * tolerance * size]
    orthonormal: Tensor = torch.linalg.qr(block - Q @ (Q.T @ block)).Q
    return orthonormal
