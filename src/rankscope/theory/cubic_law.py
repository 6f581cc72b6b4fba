r"""The cubic law: attention with a complete mask and position-free scores cubes the residual near collapse. Ours.

With :math:`X = 1x^T + R`, R centred, :math:`A_h = W_{Q,h}W_{K,h}^T`, :math:`W_h = W_{V,h}W_{O,h}` and scale s,

.. math:: R' = T(R)\,(1 + O(\|R\|)), \qquad T(R) = \frac{s}{n} \sum_h R A_h (R^TR) W_h .

With the collapsed token x known, the first-order effect of the query at x, which tilts all rows of attention alike to
:math:`\pi_h = \mathrm{softmax}(s R W_{K,h}(x W_{Q,h} + b_{Q,h})^T)`, is taken along and the error is of second order:

.. math:: T_\pi(R) = s \sum_h R A_h \mathrm{Cov}_{\pi_h}(R) W_h , \qquad
          \mathrm{Cov}_\pi(R) = R^T(\mathrm{diag}\,\pi - \pi\pi^T)R .

``cubic_bounds`` has both errors as theorems with explicit constants; ``docs/theory/cubic_law.md`` the derivation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.theory.attention_weights import AttentionWeights, HeadTensors, float64_heads
from rankscope.theory.scaled import centred, centred_unit, unit

RowMap = Tensor | Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class CubicPrediction:
    """The residual after a layer, as the cubic law has it.

    Attributes:
        log_residual: natural log of the Frobenius norm, one per sequence; -inf where the leading term vanishes.
        log_constant: c of log||R'|| = 3 log||R|| + c.
        direction: R' over its norm; zero where the leading term vanishes.
    """

    log_residual: Float[Tensor, "*batch"]
    log_constant: Float[Tensor, "*batch"]
    direction: Float[Tensor, "*batch tokens dim"]


def cubic_step(
    R: Float[Tensor, "*batch tokens dim"],
    heads: AttentionWeights,
    log_scale: Tensor | float = 0.0,
    *,
    base: Float[Tensor, "*batch dim"] | None = None,
    jacobian_before: RowMap | None = None,
    jacobian_after: RowMap | None = None,
) -> CubicPrediction:
    r"""The residual after one attention layer without skip, from :math:`e^{ls}R` before it, direction included.

    **Estimate**, of relative error :math:`O(\|R\|)`, and :math:`O(\|R\|^2)` with ``base``; for a bound see
    ``cubic_interval``. Row-wise maps (norms, MLPs) act by their Jacobians at the collapsed point, :math:`R \to RJ`:
    they change the constant, never the order. Value, key and output biases play no part. Scores must not be capped,
    no key may be hidden from some rows only, and no probability may go to a sink outside the sequence.

    Args:
        R: what is left of the tokens after their mean; a unit direction with ``log_scale``, or the residual itself.
        heads: weights of the layer.
        log_scale: natural log of the factor on R, a number or one per sequence.
        base: the collapsed token as attention sees it (after ``jacobian_before``'s map); leave out for the plain law.
        jacobian_before: matrix (dim, dim) or linear function of rows, from the stream to attention's input.
        jacobian_after: the same from attention's output on.

    Example:
        Two tokens at +-1 in one dimension, all weights 1, n = 2: :math:`R R^TR/n = R`.

        >>> from rankscope.theory.attention_weights import head_tensors
        >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
        >>> after = cubic_step(torch.tensor([[1.0], [-1.0]]), head_tensors(one, one, one, one), log_scale=-1000.0)
        >>> round(after.log_residual.item() - 0.5 * torch.tensor(2.0).log().item(), 6)
        -3000.0
    """
    D, log_given = centred_unit(R, log_scale)
    before, log_before = _through(D, jacobian_before)
    attended, log_attended = unit(leading_term(before, float64_heads(heads), log_given + log_before, base))
    after, log_after = _through(attended, jacobian_after)
    log_constant = 3 * log_before + log_attended + log_after
    return CubicPrediction(3 * log_given + log_constant, log_constant, after)


def cubic_constant(
    R: Float[Tensor, "*batch tokens dim"],
    heads: AttentionWeights,
    *,
    jacobian_before: RowMap | None = None,
    jacobian_after: RowMap | None = None,
) -> Float[Tensor, "*batch"]:
    r"""Constant c of the law :math:`\log\|R'\| = 3\log\|R\| + c` in the direction of R. **Exact** in the limit.

    -inf where the leading term vanishes; the order is then above 3.

    Example:
        For R of rank one along a unit vector v, c is the log of :math:`(s/n)\|\sum_h (v^TA_hv) v^TW_h\|`.

        >>> from rankscope.theory.attention_weights import head_tensors
        >>> eye = torch.eye(3, dtype=torch.float64).unsqueeze(0)
        >>> R = torch.tensor([[1.0, 0, 0], [-1.0, 0, 0], [0, 0, 0], [0, 0, 0]])
        >>> round(cubic_constant(R, head_tensors(eye, eye, 6 * eye, eye, scale=1.0)).exp().item(), 12)
        1.5
    """
    return cubic_step(R, heads, jacobian_before=jacobian_before, jacobian_after=jacobian_after).log_constant


def leading_term(
    D: Float[Tensor, "*batch tokens dim"],
    heads: HeadTensors,
    log_scale: Float[Tensor, "*batch"],
    base: Float[Tensor, "*batch dim"] | None,
) -> Float[Tensor, "*batch tokens dim"]:
    """T(D), or with a base T_pi(D) with the tilt of e^log_scale D; D centred, float64."""
    rows = D.unsqueeze(-3)
    Q, K, V = rows @ heads.W_Q, rows @ heads.W_K, rows @ heads.W_V
    if base is None:
        covariance = K.transpose(-1, -2) @ V / D.shape[-2]
    else:
        pi = common_attention(K, heads, log_scale, base).unsqueeze(-1)
        K, V = K - (pi * K).sum(-2, keepdim=True), V - (pi * V).sum(-2, keepdim=True)
        covariance = K.transpose(-1, -2) @ (pi * V)
    return centred((Q @ (covariance @ heads.W_O)).sum(-3) * heads.scale)


def common_attention(
    K: Float[Tensor, "*batch heads tokens d_qk"],
    heads: HeadTensors,
    log_scale: Float[Tensor, "*batch"],
    base: Float[Tensor, "*batch dim"],
) -> Float[Tensor, "*batch heads tokens"]:
    """pi: the attention that the collapsed token pays to each key, K being the direction through W_K."""
    query = (base.detach().to(torch.float64).unsqueeze(-2).unsqueeze(-2) @ heads.W_Q).squeeze(-2) + heads.b_Q
    tilt = heads.scale * (K @ query.unsqueeze(-1)).squeeze(-1) * log_scale.exp().unsqueeze(-1).unsqueeze(-1)
    return torch.softmax(tilt, dim=-1)


def _through(D: Tensor, jacobian: RowMap | None) -> tuple[Tensor, Tensor]:
    """Direction after a linear map of rows, and the log of the gain."""
    if jacobian is None:
        return D, D.new_zeros(D.shape[:-2])
    moved = D @ jacobian.detach().to(torch.float64) if isinstance(jacobian, Tensor) else jacobian(D)
    return unit(centred(moved))
