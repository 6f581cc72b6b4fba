r"""The spectral law: with a mask or positions collapse is exponential, at the rate of the second eigenvalue. Ours.

Where the scores at the collapsed point still differ between rows, :math:`R' = C P_0 R W`, with :math:`P_0` the
attention at that point. :math:`P_0` fixes the all-ones vector and C removes it, so the map on tokens has the
eigenvalues :math:`\lambda_2, \lambda_3, \dots` of :math:`P_0`, and late in depth each layer multiplies by
:math:`|\lambda_2|` times the growth of W. A causal mask has :math:`\lambda_i = 1/i`: exactly 1/2 per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from rankscope._citations import Cite
from rankscope.theory.scaled import centred
from rankscope.theory.sparse_spectrum import sparse_second_mode
from rankscope.theory.stochastic import DENSE_LIMIT, dense_stochastic, is_sparse, reversing_weights, triangle_of
from rankscope.theory.triangular import lower_second_mode

# Exponential collapse under a mask was proved there, with a rate from the radius of the graph.
COMPARED_WITH = Cite("wu2024role", "thm. 1")


@dataclass(frozen=True, eq=False)
class SecondMode:
    r"""The slowest mode of :math:`CP_0`.

    Attributes:
        eigenvalue: :math:`\lambda_2`, the largest in modulus once the eigenvalue 1 of the all-ones vector is removed.
        right: v with :math:`CP_0v = \lambda_2v`, centred, of norm 1: the pattern over tokens that is left late in
        depth. left: l with :math:`l^TP_0 = \lambda_2l^T`, of norm 1: what of the tokens survives into it. method:
        ``"equal rows"`` (no mode is left, vectors zero), ``"triangular"``, ``"reversible"``, ``"dense"`` or
            ``"arnoldi"``.
    """

    eigenvalue: complex
    right: Complex[Tensor, " tokens"]
    left: Complex[Tensor, " tokens"]
    method: str

    @property
    def factor(self) -> float:
        """Modulus of the eigenvalue."""
        return abs(self.eigenvalue)

    @property
    def condition(self) -> float:
        r""":math:`1/|l^Tv|`, 1 or more: how much a change of :math:`P_0` moves the eigenvalue; inf if defective."""
        overlap = float((self.left * self.right).sum().abs())
        return 1 / overlap if overlap > 0 else float("inf")


class _Pair(NamedTuple):
    eigenvalue: Tensor
    right: Tensor
    left: Tensor


def second_mode(P0: Any) -> SecondMode:
    r"""Second eigenvalue of a stochastic matrix and its left and right vectors.

    **Exact** to rounding times ``condition``, which is large for masks that look mostly one way. Where the matrix is
    triangular (causal masks) it is read from the diagonal and exact; where a mask has a symmetric pattern and uniform
    rows the problem is symmetric; otherwise it is the general dense one, and above 2048 tokens, for a sparse matrix, an
    iteration. 0 for a matrix with equal rows, 1 where the graph falls apart.

    Args:
        P0: a tensor or scipy sparse matrix; row i is what token i pays to each token.

    Raises:
        InputError: P0 is not row-stochastic.
        MissingExtraError: a large sparse matrix without scipy.

    Example:
        >>> causal = torch.ones(5, 5, dtype=torch.float64).tril()
        >>> mode = second_mode(causal / causal.sum(-1, keepdim=True))
        >>> mode.eigenvalue, mode.method
        ((0.5+0j), 'triangular')
        >>> [round(v, 6) for v in (1 - mode.right.real / mode.right.real[0]).tolist()]
        [0.0, 0.5, 1.0, 1.5, 2.0]
    """
    if is_sparse(P0) and P0.shape[0] > DENSE_LIMIT:
        eigenvalue, right, left, method = sparse_second_mode(P0)
        return SecondMode(eigenvalue, right, left, method)
    P = dense_stochastic(P0)
    if bool(centred(P).abs().max() <= 4 * torch.finfo(torch.float64).eps):
        zero = torch.zeros(P.shape[0], dtype=torch.complex128, device=P.device)
        return SecondMode(0j, zero, zero, "equal rows")
    triangle, weights = triangle_of(P), reversing_weights(P)
    if triangle is not None:
        pair, method = _triangular(P, triangle), "triangular"
    elif weights is not None:
        pair, method = _reversible(P, weights), "reversible"
    else:
        pair, method = _general(P), "dense"
    right = centred(pair.right.unsqueeze(-1)).squeeze(-1)
    return SecondMode(complex(pair.eigenvalue.item()), _normed(right), _normed(pair.left), method)


def spectral_factor(P0: Any, W: Float[Tensor, "dim dim"] | None = None) -> float:
    r"""Late factor per layer :math:`|\lambda_2(P_0)|\,\rho(W)`, the spectral radius of :math:`R \to CP_0RW`.

    **Exact**: the eigenvalues of the map are the products of those of :math:`CP_0` and of W. Leave W out where values
    and outputs keep norms. For heads with different attention use ``heads_factor``.

    Example:
        >>> causal = torch.ones(8, 8, dtype=torch.float64).tril()
        >>> spectral_factor(causal / causal.sum(-1, keepdim=True), 3 * torch.eye(2))
        1.5
    """
    growth = 1.0 if W is None else float(torch.linalg.eigvals(W.detach().to(torch.float64)).abs().max())
    return second_mode(P0).factor * growth


def _triangular(P: Tensor, triangle: str) -> _Pair:
    """Through the lower triangular matrix; an upper one is it with the tokens counted from the other end."""
    L = P if triangle == "lower" else P.flip(0, 1)
    second, right, left = lower_second_mode(L.diagonal(), lambda i, v: L[i] @ v, lambda i, v: L[:, i] @ v)
    if triangle == "upper":
        right, left = right.flip(0), left.flip(0)
    return _Pair(torch.tensor(second, dtype=torch.complex128), right.to(torch.complex128), left.to(torch.complex128))


def _reversible(P: Tensor, weights: Tensor) -> _Pair:
    """Through the symmetric matrix similar to P, with the all-ones vector's eigenvalue moved to 0."""
    root = weights.sqrt()
    symmetric = root.unsqueeze(-1) * P / root
    fixed = root / torch.linalg.vector_norm(root)
    values, vectors = torch.linalg.eigh((symmetric + symmetric.T) / 2 - torch.outer(fixed, fixed))
    top = int(values.abs().argmax())
    s = vectors[:, top]
    return _Pair(values[top].to(torch.complex128), (s / root).to(torch.complex128), (s * root).to(torch.complex128))


def _general(P: Tensor) -> _Pair:
    B = centred(P)
    values, vectors = torch.linalg.eig(B)
    top = int(values.abs().argmax())
    left_values, left_vectors = torch.linalg.eig(B.T.contiguous())
    same = int((left_values - values[top]).abs().argmin())
    left = left_vectors[:, same]
    return _Pair(values[top], vectors[:, top], left - left.mean())


def _normed(vector: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(vector)
    return vector / torch.where(norm > 0, norm, torch.ones_like(norm))
