r"""The cubic law: attention with a complete mask and position-free scores cubes the residual near collapse. Ours.

With :math:`X = 1x^T + R`, R centred, :math:`A_h = W_{Q,h}W_{K,h}^T`, :math:`W_h = W_{V,h}W_{O,h}` and scale s,

.. math:: R' = T(R)\,(1 + O(\|R\|)), \qquad T(R) = \frac{s}{n} \sum_h R A_h (R^TR) W_h .

If the collapsed token x is known, the first-order effect of the query at x, which tilts all rows equally to
:math:`\pi_h = \mathrm{softmax}(s R W_{K,h}(x W_{Q,h} + b_{Q,h})^T)`, is included and the error is of second order:

.. math:: T_\pi(R) = s \sum_h R A_h \mathrm{Cov}_{\pi_h}(R) W_h , \qquad
          \mathrm{Cov}_\pi(R) = R^T(\mathrm{diag}\,\pi - \pi\pi^T)R .

Both errors are theorems with explicit constants; ``docs/theory/cubic_law.md`` has the derivation. The law with
its error is a lower and an upper bound on the residual after an attention layer.

**Theorem.** Complete mask, position-free bilinear scores, no skip; any n, any biases, any centred R. For head h let
:math:`D_{h,i}` be the spread (largest less smallest entry) of row i of :math:`E_h = s R A_h R^T`, :math:`U_h` that of
the tilt :math:`u_h = s R W_{K,h}(xW_{Q,h}+b_{Q,h})^T`, and :math:`\Delta_h` the diameter of the rows of :math:`RW_h`.
Then

.. math::
    \|R' - T_\pi(R)\|_F \le \sum_h \tfrac18 \Delta_h \sqrt{\textstyle\sum_i D_{h,i}^4} =: K_2(R), \qquad
    \|T_\pi(R) - T(R)\|_F \le \sum_h \tfrac14 U_h \Delta_h \sqrt{\textstyle\sum_i D_{h,i}^2} =: K_1(R).

:math:`T, T_\pi` are of third degree in R (pi apart), :math:`K_1` of fourth, :math:`K_2` of fifth: nothing is asymptotic
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

from rankscope.linalg.attention_weights import AttentionWeights, HeadTensors, float64_heads
from rankscope.linalg.precision import as_float64
from rankscope.linalg.scaled import centred, centred_unit, unit


@dataclass(frozen=True, eq=False)
class CubicPrediction:
    """The residual after a layer, according to the cubic law.

    Attributes:
        log_residual: natural log of the Frobenius norm, one per sequence; -inf if the leading term vanishes.
        log_constant: c of log||R'|| = 3 log||R|| + c.
        direction: R' divided by its norm; zero if the leading term vanishes.
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
) -> CubicPrediction:
    r"""The residual after one attention layer without skip, from :math:`e^{ls}R` before it, direction included.

    **Estimate**, of relative error :math:`O(\|R\|)`, and :math:`O(\|R\|^2)` with ``base``; for a bound see
    ``cubic_interval``. Value, key and output biases have no effect. Scores must not be capped, no key may be hidden
    from some rows only, and no probability may go to a sink outside the sequence.

    Args:
        R: the tokens minus their mean; a unit direction with ``log_scale``, or the residual itself.
        heads: weights of the layer.
        log_scale: natural log of the factor on R, a number or one per sequence.
        base: the collapsed token as attention sees it; omit it for the plain law.

    Example:
        Two tokens at +-1 in one dimension, all weights 1, n = 2: :math:`R R^TR/n = R`.

        >>> from rankscope.linalg.attention_weights import head_tensors
        >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
        >>> after = cubic_step(torch.tensor([[1.0], [-1.0]]), head_tensors(one, one, one, one), log_scale=-1000.0)
        >>> round(after.log_residual.item() - 0.5 * torch.tensor(2.0).log().item(), 6)
        -3000.0
    """
    D, log_given = centred_unit(R, log_scale)
    after, log_constant = unit(leading_term(D, float64_heads(heads), log_given, base))
    return CubicPrediction(3 * log_given + log_constant, log_constant, after)


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
    """pi: the attention of the collapsed token to each key, where K is the direction after W_K."""
    query = (as_float64(base.detach()).unsqueeze(-2).unsqueeze(-2) @ heads.W_Q).squeeze(-2) + heads.b_Q
    tilt = heads.scale * (K @ query.unsqueeze(-1)).squeeze(-1) * log_scale.exp().unsqueeze(-1).unsqueeze(-1)
    return torch.softmax(tilt, dim=-1)


_EPS = torch.finfo(torch.float64).eps


def rounding_allowance(
    D: Float[Tensor, "*batch tokens dim"],
    heads: HeadTensors,
    log_scale: Float[Tensor, "*batch"],
    base: Float[Tensor, "*batch dim"],
) -> Float[Tensor, "*batch"]:
    r"""Bound on the error of ``leading_term(D, heads, log_scale, base)`` for a unit direction, in Frobenius norm.

    **Bound** to first order in machine epsilon, doubled to cover higher orders. A product of inner dimension m has an
    error of at most m eps times the Frobenius norms of its factors; an error propagates through the computed factors
    that follow.

    Example:
        >>> from rankscope.linalg.attention_weights import head_tensors
        >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
        >>> R = torch.tensor([[0.5**0.5], [-(0.5**0.5)]], dtype=torch.float64)
        >>> float(rounding_allowance(R, head_tensors(one, one, one, one), R.new_tensor(-9.0), R.new_zeros(1))) < 1e-13
        True
    """
    n, dim = D.shape[-2:]
    count, d_v, _ = heads.W_O.shape
    d_qk = heads.W_Q.shape[2]
    w_q, w_k, w_v, w_o = (_norm(W) for W in (heads.W_Q, heads.W_K, heads.W_V, heads.W_O))
    rows = D.unsqueeze(-3)
    Q, K, V = rows @ heads.W_Q, rows @ heads.W_K, rows @ heads.W_V
    pi = common_attention(K, heads, log_scale, base)
    largest = pi.amax(-1)
    covariance = K.transpose(-1, -2) @ (pi.unsqueeze(-1) * V) - (pi.unsqueeze(-2) @ K).mT @ (pi.unsqueeze(-2) @ V)
    G = covariance @ heads.W_O
    q, k, v, g = _norm(Q), _norm(K), _norm(V), _norm(G)
    # 16: normalising and centring D; n: the means under pi
    off_q, off_k, off_v = ((dim + n + 16) * _EPS * w for w in (w_q, w_k, w_v))
    in_pi = _EPS * (8 + 2 * (dim + d_qk) * _exponent(heads, log_scale, base, w_q, w_k))
    off_covariance = largest * (off_k * v + k * off_v + (2 * n * _EPS + 2 * in_pi) * k * v)
    off_g = off_covariance * w_o + d_v * _EPS * _norm(covariance) * w_o
    off = off_q * g + q * off_g + (d_qk + count + n) * _EPS * q * g
    return 2 * abs(heads.scale) * off.sum(-1)


def _norm(M: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(M, dim=(-2, -1))
    return norm


def _exponent(heads: HeadTensors, log_scale: Tensor, base: Tensor, w_q: Tensor, w_k: Tensor) -> Tensor:
    """Bound on every entry of the tilt, and on the sums of absolute values in its computation."""
    x = torch.linalg.vector_norm(as_float64(base.detach()), dim=-1, keepdim=True)
    query = x * w_q + torch.linalg.vector_norm(heads.b_Q, dim=-1)
    largest: Tensor = log_scale.exp().unsqueeze(-1) * abs(heads.scale) * query * w_k
    return largest


@dataclass(frozen=True, eq=False)
class CubicInterval:
    """Bounds on the log of the residual after a layer, one per sequence.

    Attributes:
        log_lower_bound: -inf if the error may be as large as the leading term: no bound is claimed then.
        log_upper_bound: finite unless the residual was zero.
        log_leading: log||T_pi(R)||, the estimate.
        log_remainder: log of the half-width, K_2(R) and rounding together.
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
    To include a linear map after attention, multiply W_O by it.

    Args:
        R: the residual before attention, or its direction with ``log_scale``.
        heads: weights of the layer.
        base: x, the mean token before attention.
        log_scale: natural log of the factor on R.

    Example:
        Two tokens x +- r in one dimension, weights 1, x = 0: :math:`R' = r\tanh r^2` per token, and T(R) is
        :math:`r^3`.

        >>> from rankscope.linalg.attention_weights import head_tensors
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
    # log of zero means that there is no lower bound
    log_low = 3 * log_r + (leading - remainder).clamp_min(0.0).log()
    log_high = 3 * log_r + torch.minimum(leading + remainder, constants.whole + rounding).log()
    # the rounding of the logs themselves
    slack = 8 * _EPS * (1 + torch.nan_to_num(log_r.abs(), posinf=0.0))
    return CubicInterval(log_low - slack, log_high + slack, 3 * log_r + leading.log(), 3 * log_r + remainder.log())


class RemainderConstants(NamedTuple):
    """Constants of a unit direction: times r^4 they bound T_pi - T, times r^5 R' - T_pi, times r^3 R' itself."""

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
    x = as_float64(base.detach()).unsqueeze(-2)
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
