r"""Bounds on the residual after many attention layers, from the input alone. Ours.

The state is :math:`X = 1(x+\xi)^T + r(D + F)` with x, r, D computed and only bounds known of the rest:
:math:`\|\xi\| \le \eta`, :math:`\|F\|_F \le \delta`. One layer of pure attention, with :math:`a_h, w_h, \kappa_h` as in
``cubic_constants`` and :math:`\pi_h` the attention at the computed state, gives
:math:`r' D' = r^3 T_\pi(D)` and

.. math::
    \delta' &= \frac{1}{\|T_\pi(D)\|} \sum_h \Bigl[ a_hw_h\max\pi_h\bigl((1+\delta)^3 - 1\bigr)
        + \tfrac{\sqrt2}{2} a_hw_h(\kappa_h\delta + a_h\eta(1+\delta))\,r(1+\delta)^3
        + \tfrac{\sqrt2}{4} a_h^2w_hr^2(1+\delta)^5 \Bigr], \\
    \eta' &= \eta\,\Bigl\|\sum_h W_h\Bigr\|_2 + r(1+\delta)\sum_h w_h .

The three terms: T is trilinear; the tilt of pi was off by :math:`\kappa\sqrt2\delta r + a\eta\sqrt2 r(1+\delta)`,
which enters as in the proof of :math:`K_1`; and :math:`K_2` in operator norms. Every row of :math:`PR` is a mean of
rows of R.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope._errors import InputError
from rankscope.theory.attention_weights import AttentionWeights, HeadTensors, float64_heads
from rankscope.theory.cubic_law import common_attention, leading_term, rounding_allowance
from rankscope.theory.operator_norms import head_norms, query_norms
from rankscope.theory.scaled import centred_unit, unit

_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)
class ChainState:
    """Where a chain stands: what is computed, and by how much it may be off.

    Attributes:
        direction: D, of norm 1.
        log_residual: log r; the true residual is within a factor 1 +- ``direction_error`` of r.
        direction_error: delta; at 1 and above nothing is known from below.
        base: x, the computed mean token.
        base_error: eta.
    """

    direction: Float[Tensor, "tokens dim"]
    log_residual: float
    direction_error: float
    base: Float[Tensor, " dim"]
    base_error: float

    @property
    def log_lower_bound(self) -> float:
        """-inf where nothing is claimed."""
        below = torch.tensor(max(1.0 - self.direction_error, 0.0), dtype=torch.float64)
        return self.log_residual + float(below.log()) - self._log_rounding

    @property
    def log_upper_bound(self) -> float:
        """Upper bound on the log of the residual."""
        above = torch.tensor(1.0 + self.direction_error, dtype=torch.float64)
        return self.log_residual + float(above.log()) + self._log_rounding

    @property
    def _log_rounding(self) -> float:
        return 32 * _EPS * (1 + abs(self.log_residual))


def cubic_chain(
    layers: Sequence[AttentionWeights],
    R: Float[Tensor, "tokens dim"],
    base: Float[Tensor, " dim"],
    log_scale: float = 0.0,
) -> Iterator[ChainState]:
    """The state after each layer of pure attention (no skip, norm or MLP; complete mask; position-free).

    **Bound**, lower and upper, on the residual of every layer from the input of the first. The direction error grows
    by a factor of about 3 sum(a w) / (n ||T(D)||) per layer while the residual falls doubly exponentially, so the
    chain holds from where the input is already close to collapse; from elsewhere restart it at a measured layer.

    Example:
        Two tokens at x +- r in one dimension, weights 1, x = 0: r -> r tanh(r^2), close to r^3, then r^9.

        >>> from rankscope.theory.attention_weights import head_tensors
        >>> one, r = torch.ones(1, 1, 1, dtype=torch.float64), 1e-3
        >>> layers = [head_tensors(one, one, one, one)] * 2
        >>> last = list(cubic_chain(layers, torch.tensor([[r], [-r]], dtype=torch.float64), torch.zeros(1)))[-1]
        >>> exact = torch.tensor(2.0, dtype=torch.float64).log().item() / 2 + 9 * torch.tensor(r).double().log().item()
        >>> last.log_lower_bound < exact < last.log_upper_bound < last.log_lower_bound + 1e-4
        True
    """
    D, log_r = centred_unit(R, log_scale)
    if D.ndim != 2 or not bool(log_r.isfinite()):
        raise InputError(f"A chain was started from R of shape {tuple(R.shape)}. Expected one matrix that is not zero.")
    state = ChainState(D, float(log_r), 4 * max(D.shape) * _EPS, base.detach().to(torch.float64), 0.0)
    for heads in layers:
        state = _after(state, float64_heads(heads))
        yield state


def _after(state: ChainState, heads: HeadTensors) -> ChainState:
    log_r = torch.tensor(state.log_residual, dtype=torch.float64)
    r, delta, eta = float(log_r.exp()), state.direction_error, state.base_error
    leading = leading_term(state.direction, heads, log_r, state.base)
    direction, log_gain = unit(leading)
    norms, kappa = head_norms(heads), query_norms(heads, state.base)
    pi = common_attention(state.direction @ heads.W_K, heads, log_r, state.base)
    aw = norms.score * norms.value
    trilinear = (aw * pi.amax(-1)).sum() * _expanded(delta, 3)
    tilt = (aw * (kappa * delta + norms.score * eta * (1 + delta))).sum() * r * (1 + delta) ** 3 * 2**-0.5
    second = (aw * norms.score).sum() * r**2 * (1 + delta) ** 5 * 2**-1.5
    rounding = rounding_allowance(state.direction, heads, log_r, state.base)
    # a zero leading term leaves nothing to compare with: the error is infinite and the bound from below empty
    error = (trilinear + tilt + second + rounding) / log_gain.exp()
    through = (heads.W_V @ heads.W_O).sum(0)
    moved = state.base @ through + (heads.b_V.unsqueeze(-2) @ heads.W_O).sum(0).squeeze(0) + heads.b_O
    base_error = eta * torch.linalg.matrix_norm(through, 2) + r * (1 + delta) * norms.value.sum()
    base_error = base_error + 4 * max(through.shape) * _EPS * torch.linalg.vector_norm(moved)
    return ChainState(direction, 3 * state.log_residual + float(log_gain), float(error), moved, float(base_error))


def _expanded(delta: float, power: int) -> float:
    """(1 + delta)^power - 1 without cancellation."""
    return float(torch.expm1(power * torch.log1p(torch.tensor(delta, dtype=torch.float64))))
