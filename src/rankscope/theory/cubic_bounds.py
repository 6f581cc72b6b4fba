r"""The cubic law with its error: a lower and an upper bound on the residual after an attention layer. Ours.

**Theorem.** Complete mask, position-free bilinear scores, no skip; any n, any biases, any centred R. For head h let
:math:`D_{h,i}` be the spread (largest less smallest entry) of row i of :math:`E_h = s R A_h R^T`, :math:`U_h` that of
the tilt :math:`u_h = s R W_{K,h}(xW_{Q,h}+b_{Q,h})^T`, and :math:`\Delta_h` the diameter of the rows of :math:`RW_h`.
Then

.. math::
    \|R' - T_\pi(R)\|_F \le \sum_h \tfrac18 \Delta_h \sqrt{\textstyle\sum_i D_{h,i}^4} =: K_2(R), \qquad
    \|T_\pi(R) - T(R)\|_F \le \sum_h \tfrac14 U_h \Delta_h \sqrt{\textstyle\sum_i D_{h,i}^2} =: K_1(R).

:math:`T, T_\pi` are of third degree in R (pi aside), :math:`K_1` of fourth, :math:`K_2` of fifth: nothing is asymptotic
here, and near collapse the interval :math:`\|T_\pi(R)\| \mp K_2(R)` closes like :math:`\|R\|^2`.

*Proof.* Row i of :math:`P_hRW_h` is :math:`f(1)`, where :math:`f(t)` is the mean of the rows b of :math:`RW_h` under
:math:`p_t = \mathrm{softmax}(u + tE_i)`. :math:`f(0)` is the same for all rows and centring removes it.
:math:`f'(0) = \mathrm{Cov}_\pi(E_i, b)` is row i of :math:`T_\pi`. The norm of
:math:`f''(t) = \mathbb{E}_{p_t}[(E_i-\bar E_i)^2(b-\bar b)]` is at most :math:`(D_i^2/4)\,\Delta` by Popoviciu's
inequality on variances, and Taylor's remainder halves it. For :math:`K_1` go from the uniform distribution to pi along
:math:`\mathrm{softmax}(\tau u)`: the derivative of :math:`\mathrm{Cov}(E_i, v^Tb)` for a unit vector v is
:math:`\mathbb{E}[(u-\bar u)(E_i-\bar E_i)(v^Tb-v^T\bar b)]`, at most :math:`U (D_i/2)(\Delta/2)` by Cauchy-Schwarz.
Centring increases no norm. ∎

Stopping at the first derivative gives :math:`\|R'\|_F \le \sum_h \frac14\Delta_h\sqrt{\sum_i D_{h,i}^2}`, which is
the smaller upper bound far from collapse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.theory.attention_weights import AttentionWeights, HeadTensors, float64_heads
from rankscope.theory.cubic_law import leading_term
from rankscope.theory.cubic_rounding import rounding_allowance
from rankscope.theory.scaled import centred_unit

_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)
class CubicInterval:
    """Bounds on the log of the residual after a layer, one per sequence.

    Attributes:
        log_lower_bound: -inf where the error may be as large as the leading term: nothing is claimed there.
        log_upper_bound: always finite, unless the residual was zero.
        log_leading: log||T_pi(R)||, the estimate inside.
        log_remainder: log of what was taken off and added, K_2(R) and rounding together.
    """

    log_lower_bound: Float[Tensor, "*batch"]
    log_upper_bound: Float[Tensor, "*batch"]
    log_leading: Float[Tensor, "*batch"]
    log_remainder: Float[Tensor, "*batch"]


def cubic_interval(
    R: Float[Tensor, "*batch tokens dim"],
    heads: AttentionWeights,
    base: Float[Tensor, "*batch dim"],
    log_scale: Tensor | float = 0.0,
) -> CubicInterval:
    r"""Lower and upper bound on :math:`\log\|R'\|_F` after attention without skip, from :math:`1x^T + e^{ls}R` before.

    **Bound**, both ways, for the residual R as given: the theorem above. The float64 rounding of this computation is
    bounded to first order and included, so the interval does not close further than about 1e-12 (1e-7 at width 768).
    A linear map after attention is taken along by multiplying W_O with it.

    Args:
        R: the residual before attention, or its direction with ``log_scale``.
        heads: weights of the layer.
        base: x, the mean token before attention.
        log_scale: natural log of the factor on R.

    Example:
        Two tokens x +- r in one dimension, weights 1, x = 0: :math:`R' = r\tanh r^2` per token, and T(R) is
        :math:`r^3`.

        >>> from rankscope.theory.attention_weights import head_tensors
        >>> one, r = torch.ones(1, 1, 1, dtype=torch.float64), 0.1
        >>> R = torch.tensor([[r], [-r]], dtype=torch.float64)
        >>> bounds = cubic_interval(R, head_tensors(one, one, one, one), torch.zeros(1))
        >>> exact = (2**0.5 * r * torch.tensor(r * r, dtype=torch.float64).tanh()).log()
        >>> bool(bounds.log_lower_bound <= exact <= bounds.log_upper_bound)
        True
        >>> (bounds.log_upper_bound - bounds.log_lower_bound).item() < 0.03
        True
    """
    wide = float64_heads(heads)
    D, log_r = centred_unit(R, log_scale)
    leading = torch.linalg.vector_norm(leading_term(D, wide, log_r, base), dim=(-2, -1))
    constants = remainder_constants(D, wide, base)
    rounding = rounding_allowance(D, wide, log_r, base)
    remainder = constants.second * (2 * log_r).exp() + rounding
    # log of zero is where no lower bound holds
    log_low = 3 * log_r + (leading - remainder).clamp_min(0.0).log()
    log_high = 3 * log_r + torch.minimum(leading + remainder, constants.whole + rounding).log()
    # the rounding of the logs themselves
    slack = 8 * _EPS * (1 + torch.nan_to_num(log_r.abs(), posinf=0.0))
    return CubicInterval(log_low - slack, log_high + slack, 3 * log_r + leading.log(), 3 * log_r + remainder.log())


class RemainderConstants(NamedTuple):
    """Of a unit direction: times r^4 a bound on T_pi - T, times r^5 on R' - T_pi, times r^3 on R' itself."""

    first: Float[Tensor, "*batch"]
    second: Float[Tensor, "*batch"]
    whole: Float[Tensor, "*batch"]


def remainder_constants(
    D: Float[Tensor, "*batch tokens dim"], heads: HeadTensors, base: Float[Tensor, "*batch dim"]
) -> RemainderConstants:
    r"""K_1 and K_2 of the theorem for the direction D, and the bound without an expansion.

    **Bound.** The diameter is replaced by the smaller of twice the largest row and sqrt 2 times the Frobenius norm,
    neither of which is below it.
    """
    x = base.detach().to(torch.float64).unsqueeze(-2)
    first = second = whole = D.new_zeros(D.shape[:-2])
    for head in range(heads.W_Q.shape[0]):
        K = D @ heads.W_K[head]
        E = heads.scale * (D @ heads.W_Q[head]) @ K.transpose(-1, -2)
        spread = E.amax(-1) - E.amin(-1)
        tilt = heads.scale * (K @ (x @ heads.W_Q[head] + heads.b_Q[head]).transpose(-1, -2)).squeeze(-1)
        rows = torch.linalg.vector_norm(D @ heads.W_V[head] @ heads.W_O[head], dim=-1)
        diameter = torch.minimum(2 * rows.amax(-1), 2**0.5 * torch.linalg.vector_norm(rows, dim=-1))
        tilt_spread = tilt.amax(-1) - tilt.amin(-1)
        alone = diameter * torch.linalg.vector_norm(spread, dim=-1) / 4
        whole = whole + alone
        first = first + tilt_spread * alone
        second = second + diameter * torch.linalg.vector_norm(spread.square(), dim=-1) / 8
    return RemainderConstants(first, second, whole)
