r"""What repeated mixing of residual streams does to the differences between them.

:math:`X' = HX` for the streams X of one token, with branches left out. With :math:`U` an orthonormal basis of the
vectors that sum to zero, :math:`D = U^\top HU` is what H does to differences between streams. If the rows of H sum to
one, the mean of the streams does not turn into differences, products of H have the products of D as their own D, and
the spectral law of masks applies unchanged: differences decay as the second eigenvalue per block if all blocks are
alike, and at most by the largest singular value of each D if they are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Kind = Literal["doubly stochastic", "row-stochastic", "not stochastic"]
SUM_TOLERANCE = 1e-3
"""How far sums of rows and columns may be from one. Sinkhorn iterations stop early, and are computed in float32."""


def kind_of(H: Float[Tensor, "*batch streams streams"]) -> Kind:
    """Whether mixing matrices are doubly stochastic, row-stochastic, or neither, up to ``SUM_TOLERANCE``."""
    if float(H.min()) < -SUM_TOLERANCE or float((H.sum(-1) - 1).abs().max()) > SUM_TOLERANCE:
        return "not stochastic"
    return "doubly stochastic" if float((H.sum(-2) - 1).abs().max()) <= SUM_TOLERANCE else "row-stochastic"


def on_differences(H: Float[Tensor, "*batch streams streams"]) -> Float[Tensor, "*batch rest rest"]:
    r"""The matrix :math:`D = U^\top HU` of what H does to differences between streams, one row and column smaller.

    **Exact.** Differences as a whole, ``X - mean``, become ``D`` times themselves, plus what H makes of the mean
    (nothing, if the rows of H sum to one).
    """
    U = _zero_sum_basis(H.shape[-1]).to(H.device)
    return U.T @ H.double() @ U


def contraction(D: Float[Tensor, "*batch rest rest"]) -> Float[Tensor, "*batch"]:
    r"""Largest factor by which mixing can change the size of differences, :math:`s_1(D)`.

    **Exact.** 0 if all streams become equal at once, 1 for the identity and for a permutation.

    Example:
        >>> round(contraction(on_differences(0.5 * torch.eye(4) + 0.125)).item(), 12)
        0.5
    """
    factor: Tensor = torch.linalg.matrix_norm(D, ord=2)
    return factor


def second_eigenvalue(D: Float[Tensor, "*batch rest rest"]) -> Float[Tensor, "*batch"]:
    r"""Factor per block by which differences change in the long run if every block mixes alike, :math:`|\lambda_2|`.

    **Exact.** The largest modulus among the eigenvalues of D. If the rows of H sum to one, these are the eigenvalues of
    H other than that of the constant vector.

    Example:
        >>> turn = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
        >>> round(second_eigenvalue(on_differences(turn)).item(), 12)
        1.0
    """
    largest: Tensor = torch.linalg.eigvals(D).abs().amax(dim=-1)
    return largest


def log_product_contractions(
    matrices: Iterable[Float[Tensor, "*batch streams streams"]], *, stochastic: bool
) -> Iterator[Float[Tensor, "*batch"]]:
    r"""Natural logs of the contraction of the running product :math:`H_\ell\cdots H_0`, block by block.

    **Exact.** For stochastic matrices the D of each block are multiplied and their scale is stored separately, so that
    the curve continues below the float floor. Otherwise the products themselves are formed.

    Args:
        matrices: the mixing matrices, first block first.
        stochastic: whether their rows sum to one.
    """
    product: Tensor | None = None
    log_scale: Tensor | float = 0.0
    for H in matrices:
        factor = on_differences(H) if stochastic else H.double()
        product = factor if product is None else factor @ product
        size = product.abs().amax(dim=(-2, -1), keepdim=True)
        product = product / size.where(size > 0, 1.0)
        log_scale = log_scale + size.squeeze(-1).squeeze(-1).log()
        yield contraction(product if stochastic else on_differences(product)).log() + log_scale


def _zero_sum_basis(streams: int) -> Float[Tensor, "streams rest"]:
    """Helmert's basis: column k compares stream k + 1 with the mean of those before it."""
    U = torch.zeros(streams, streams - 1, dtype=torch.float64)
    for k in range(1, streams):
        U[:k, k - 1] = 1.0
        U[k, k - 1] = -k
        U[:, k - 1] /= math.sqrt(k * (k + 1))
    return U
