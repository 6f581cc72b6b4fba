r"""How much one attention layer can stretch or shrink a residual: two-sided, from its own attention and values. Ours.

Given the attention matrices, the residual after attention is exactly

.. math::

   R' = T(R) + \ell, \qquad T(R) = C\sum_h P_hRW_{V,h}W_{O,h}, \qquad
   \ell = C\sum_h (P_h1)(\bar xW_{V,h} + b_{V,h})W_{O,h} .

If the rows of each :math:`P_h` sum to one, :math:`P_h1 = 1`, C removes what all tokens share and the leak
:math:`\ell` is zero. If they do not (a sink outside the sequence, or rounding), rows contain
different amounts of the shared part, and its size does not depend on R. T is linear in R and its gains on centred
residuals bound :math:`\|T(R)\|_F/\|R\|_F` from both sides; :math:`\|\ell\|_F/\|R\|_F` widens both ends. With
:math:`B_h = CP_hC`, whose singular values on centred columns run from :math:`m_h` to :math:`s_h`,

.. math::

   \sigma_{\min}([m_hW_{V,h}]_h)\,\sigma_{\min}(W_O) \le \frac{\|T(R)\|_F}{\|R\|_F}
   \le \sigma_{\max}([s_hW_{V,h}]_h)\,\sigma_{\max}(W_O),

with :math:`W_O` the stacked outputs of all heads. Given the singular values
:math:`\sigma_{h,1} \ge \sigma_{h,2} \ge \dots` of the values :math:`RW_{V,h}` of the given residual, but not their
directions,

.. math::

   \sigma_{\min}(W_O)^2\sum_{h,k}s_{h,n-k}^2\sigma_{h,k}^2 \le \|T(R)\|_F^2
   \le \sigma_{\max}(W_O)^2\sum_{h,k}s_{h,k}^2\sigma_{h,k}^2,

by von Neumann's trace inequality, with :math:`s_{h,1} \ge \dots \ge s_{h,n-1}` the singular values of :math:`B_h`. Only
heads' products matter, so each head's factors may be chosen freely; the better bound of two choices is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.errors import InputError
from rankscope.ext.theory.operator_norms import product_norm
from rankscope.linalg.precision import as_float64
from rankscope.linalg.scaled import centred

_EPS = torch.finfo(torch.float64).eps
_MARGIN = 16.0
ROW_SUMS = 64 * _EPS
"""Allowed deviation of a row sum of float64 attention from one, per token, if the leak is not known."""


@dataclass(frozen=True)
class GainInterval:
    """An interval of gains."""

    lower: float
    upper: float

    def __contains__(self, value: float) -> bool:
        return self.lower <= value <= self.upper


@dataclass(frozen=True, eq=False)
class LayerGains:
    r"""Gains of a layer on centred residuals.

    Attributes:
        any_residual: **Bound**, certified: for every centred R. Its lower end is 0 if the values ignore some
            features.
        given_values: **Bound**, certified: for every R whose values have, for each head, the singular values they have
            here.
        measured: gain of the given residual, from the formula, not the model. **Exact** to rounding; NaN if it is
            zero.
        leak: :math:`\|\ell\|_F/\|R\|_F`, which widens both intervals compared with those of T; 0 if the rows of
            attention sum to one.
    """

    any_residual: GainInterval
    given_values: GainInterval
    measured: float
    leak: float = 0.0

    @property
    def narrowest(self) -> tuple[float, float]:
        """The largest lower end and the smallest upper end for this residual."""
        lower = max(self.any_residual.lower, self.given_values.lower)
        return lower, min(self.any_residual.upper, self.given_values.upper)


def layer_gains(
    R: Float[Tensor, "tokens dim"],
    P: Float[Tensor, "heads tokens tokens"],
    W_V: Float[Tensor, "heads dim d_v"],
    W_O: Float[Tensor, "heads d_v dim"],
    *,
    shared: Float[Tensor, "heads d_v"] | None = None,
    skip_gain: float = 0.0,
) -> LayerGains:
    r"""Bounds on :math:`\|gR + R'\|_F/\|R\|_F` for the layer with these attention matrices, and the value itself.

    **Bound.** Singular values are LAPACK's in float64, widened by its backward error: 16 times the larger side times
    2.2e-16 of the largest. With a skip (g not 0) the certified interval is :math:`|g| \pm` that of T.

    Args:
        R: the residual of the input of attention; centred here.
        P: its attention.
        W_V: values per head.
        W_O: outputs per head.
        shared: :math:`\bar xW_V + b_V`, the values of the mean token with their bias. Without it, the rows of P must
            sum to one.
        skip_gain: g, the gain of the skip.

    Raises:
        InputError: rows do not sum to one and ``shared`` is missing, or there are fewer than two tokens.

    Example:
        One head that averages everything leaves nothing; one that looks only at itself leaves all.

        >>> one, R = torch.ones(1, 1, 1).double(), torch.tensor([[1.0], [-1.0]]).double()
        >>> round(layer_gains(R, torch.eye(2).double()[None], one, 3 * one).measured, 12)
        3.0
        >>> layer_gains(R, torch.full((1, 2, 2), 0.5).double(), one, 3 * one).measured
        0.0
    """
    P, W_V, W_O = (as_float64(tensor.detach()) for tensor in (P, W_V, W_O))
    R = centred(as_float64(R.detach()))
    _check_rows(P, leak_is_known=shared is not None)
    leaked = torch.zeros_like(R) if shared is None else _leak(P, as_float64(shared.detach()), W_O)
    B = P - P.mean(-2, keepdim=True)
    B = B - B.mean(-1, keepdim=True)
    spectrum = torch.linalg.svdvals(B)[:, :-1]  # the last one belongs to constant columns
    slack = _MARGIN * P.shape[-1] * _EPS * spectrum[:, :1]
    high, low = spectrum + slack, (spectrum - slack).clamp_min(0.0)
    size = float(torch.linalg.vector_norm(R))
    free, given = _Tightest(), _Tightest()
    for V, outputs in _factorings(W_V, W_O):
        out_least, out_most = _ends(outputs.flatten(0, 1), side=0)
        free.take(
            out_least * _ends(_side_by_side(low[:, -1], V), side=0)[0],
            out_most * _ends(_side_by_side(high[:, 0], V), side=0)[1],
        )
        if size > 0:
            least, most = _paired(low, high, R @ V)
            given.take(out_least * least / size, out_most * most / size)
    norms = product_norm(W_V, W_O.mT) * (1 + _MARGIN * max(W_V.shape) * _EPS)
    free.take(0.0, float((high[:, 0] * norms).sum()))
    moved = (B @ (R @ W_V) @ W_O).sum(0) + skip_gain * R + leaked
    leak = float(torch.linalg.vector_norm(leaked)) * (1 + _MARGIN * max(P.shape) * _EPS) / size if size > 0 else 0.0
    return LayerGains(
        free.with_skip(skip_gain, leak),
        given.with_skip(skip_gain, leak),
        float(torch.linalg.vector_norm(moved)) / size if size > 0 else float("nan"),
        leak,
    )


def _leak(P: Tensor, shared: Tensor, W_O: Tensor) -> Tensor:
    """The part that tokens share, weighted by the different row sums, (tokens, dim) and centred."""
    sums = P.sum(-1)
    uneven = sums - sums.mean(-1, keepdim=True)  # first, so that rows with sums near zero keep their digits
    leaked = (uneven[..., None] * (shared[:, None] @ W_O)).sum(0)
    return centred(leaked)


def _paired(low: Tensor, high: Tensor, values: Tensor) -> tuple[float, float]:
    """Smallest and largest remaining norm of values (heads, tokens, d_v), over all directions of singular vectors."""
    singular_values = torch.linalg.svdvals(values)[:, : low.shape[-1]]
    slack = _MARGIN * max(values.shape) * _EPS * singular_values[:, :1]
    count = singular_values.shape[-1]
    least = torch.linalg.vector_norm(low.flip(-1)[:, :count] * (singular_values - slack).clamp_min(0.0))
    most = torch.linalg.vector_norm(high[:, :count] * (singular_values + slack))
    return float(least), float(most) * (1 + _MARGIN * _EPS)


class _Tightest:
    """The best of several bounds."""

    def __init__(self) -> None:
        self.lower, self.upper = 0.0, float("inf")

    def take(self, lower: float, upper: float) -> None:
        self.lower, self.upper = max(self.lower, lower), min(self.upper, upper)

    def with_skip(self, gain: float, leak: float) -> GainInterval:
        size = abs(gain)
        lower = max(size - self.upper, self.lower - size) if gain else self.lower
        return GainInterval(max(lower - leak, 0.0), size + self.upper + leak)


def _factorings(W_V: Tensor, W_O: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The heads as given, and with orthonormal outputs."""
    if W_O.shape[1] > W_O.shape[2]:
        return [(W_V, W_O)]
    Q, upper = torch.linalg.qr(W_O.mT)
    return [(W_V, W_O), (W_V @ upper.mT, Q.mT)]


def _side_by_side(weight: Tensor, V: Tensor) -> Tensor:
    """[w_1 V_1 | w_2 V_2 | ...], with features as rows."""
    return (weight[:, None, None] * V).permute(1, 0, 2).flatten(1)


def _ends(A: Tensor, *, side: int) -> tuple[float, float]:
    """Smallest and largest gain of A on row vectors, widened; the smallest is 0 if it has a kernel."""
    values = torch.linalg.svdvals(A)
    slack = _MARGIN * max(A.shape) * _EPS * float(values[0])
    least = 0.0 if A.shape[side] > A.shape[1 - side] else max(0.0, float(values[-1]) - slack)
    return least, float(values[0]) + slack


def _check_rows(P: Tensor, *, leak_is_known: bool) -> None:
    if P.ndim != 3 or P.shape[-1] < 2 or P.shape[-1] != P.shape[-2]:
        raise InputError(f"Attention of shape {tuple(P.shape)}. Expected (heads, tokens, tokens), two tokens or more.")
    off = float((P.sum(-1) - 1).abs().max())
    if not leak_is_known and not off <= ROW_SUMS * P.shape[-1]:
        raise InputError(
            f"A row of attention adds up to 1 only within {off:.1e}. With rows that do not add up to one the mean "
            "token does not cancel, and the residual after attention is not a function of the one before. Give "
            "shared, the values of the mean token."
        )
