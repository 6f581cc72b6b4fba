"""Operator norms: spectral norms of heads from their factors, and the composite norm of the collapse proof."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.attention_weights import HeadTensors
from rankscope.linalg.precision import as_float64
from rankscope.linalg.scaled import centred


def product_norm(left: Float[Tensor, "heads dim width"], right: Float[Tensor, "heads dim width"]) -> Tensor:
    """Spectral norm of left right^T, through the triangular factors of both."""
    product = torch.linalg.qr(left).R @ torch.linalg.qr(right).R.transpose(-1, -2)
    norms: Tensor = torch.linalg.matrix_norm(product, 2)
    return norms


DEFINED_IN = Cite("dong2021attention", "sec. 2.3")


def one_norm(A: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch"]:
    r"""Largest column sum of absolute values, :math:`\|A\|_1` (**Exact**).

    Example:
        >>> one_norm(torch.tensor([[1.0, -2.0], [3.0, 0.0]], dtype=torch.float64)).item()
        4.0
    """
    return A.abs().sum(-2).amax(-1)


def inf_norm(A: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch"]:
    r"""Largest row sum of absolute values, :math:`\|A\|_\infty` (**Exact**).

    Example:
        >>> inf_norm(torch.tensor([[1.0, -2.0], [3.0, 0.0]], dtype=torch.float64)).item()
        3.0
    """
    return A.abs().sum(-1).amax(-1)


def composite_norm(A: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch"]:
    r""":math:`\|A\|_{1,\infty} = \sqrt{\|A\|_1\|A\|_\infty}`. **Exact**; submultiplicative, but not a norm.

    The triangle inequality fails: a matrix with one full column and its transpose have composite :math:`\sqrt d` each,
    and their sum about d.

    Example:
        >>> tall = torch.zeros(16, 16, dtype=torch.float64)
        >>> tall[:, 0] = 1.0
        >>> composite_norm(tall).item(), composite_norm(tall + tall.T).item()
        (4.0, 17.0)
    """
    return (one_norm(A) * inf_norm(A)).sqrt()


@dataclass(frozen=True, eq=False)
class ScoreSpread:
    r"""How the scores :math:`E = sRW_{QK}R^T` of each head differ along rows; (heads,) each.

    Attributes:
        largest: :math:`\max_i D_{ii}`, where :math:`D_{ii} = \max_{j,j'}|E_{ij} - E_{ij'}|`.
        total: :math:`\sum_i D_{ii}`.
        one: :math:`\|E\|_1`.
    """

    largest: Float[Tensor, " heads"]
    total: Float[Tensor, " heads"]
    one: Float[Tensor, " heads"]


def score_spread(R: Float[Tensor, "tokens dim"], heads: HeadTensors) -> ScoreSpread:
    r"""Spread of the scores that differ between rows, for tokens :math:`1x^T + R` and a complete mask (**Exact**).

    Biases have no effect: what they and x add to the scores is constant along each row or the same for every row.

    Example:
        >>> from rankscope.linalg.attention_weights import head_tensors
        >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
        >>> spread = score_spread(torch.tensor([[1.0], [-1.0]]).double(), head_tensors(one, one, one, one))
        >>> spread.largest.item(), spread.total.item(), spread.one.item()
        (2.0, 4.0, 2.0)
    """
    E = heads.scale * (R @ heads.W_Q) @ (R @ heads.W_K).mT
    D = E.amax(-1) - E.amin(-1)
    return ScoreSpread(D.amax(-1), D.sum(-1), one_norm(E))


def composite_residual(X: Float[Tensor, "tokens dim"]) -> Float[Tensor, ""]:
    r""":math:`\|X - 1\bar x^T\|_{1,\infty}` about the mean token.

    **Exact** about the mean, and never below the residual about the best centre, so an upper bound on it also bounds
    the latter.
    """
    return composite_norm(centred(X))


def spectral_bound(A: Float[Tensor, "rows columns"]) -> float:
    r"""Upper bound on :math:`\|A\|_2`. **Bound**: LAPACK's value in float64, widened by its backward error.

    Power iteration would give a lower bound.

    Example:
        >>> 2.0 <= spectral_bound(torch.diag(torch.tensor([2.0, 1.0]))) <= 2.0 + 1e-12
        True
    """
    A = as_float64(A.detach())
    return (1 + 16 * max(A.shape) * torch.finfo(torch.float64).eps) * float(torch.linalg.svdvals(A)[0])
