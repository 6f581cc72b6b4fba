r"""What happens before the late factor is reached: the transient of a non-normal :math:`B = CP_0`. Ours.

For a mask whose :math:`P_0` is not normal (causal windows above all) :math:`\|B^t\|` stays near 1 for many layers
before it falls like :math:`|\lambda_2|^t`: eigenvalues alone mislead a network that is not deep enough.
(:math:`CP_0^t = (CP_0)^t` because :math:`P_0` fixes the all-ones vector.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope._errors import InputError
from rankscope.theory.scaled import centred, unit
from rankscope.theory.spectral_law import second_mode
from rankscope.theory.stochastic import dense_stochastic

_ANGLES = 64
_RADII = 24


@dataclass(frozen=True, eq=False)
class Transient:
    r"""How far the early layers differ from the late law.

    Attributes:
        log_late_factor: :math:`\log|\lambda_2|`.
        log_norms: :math:`\log\|B^t\|_2` for t = 1 to the horizon.
        log_delay: the largest :math:`\log(\|B^t\|/|\lambda_2|^t)` seen: the constant in front of the late law.
        log_delay_lower_bound: a lower bound on the same over all t, from the resolvent (Kreiss).
        length: the last layer whose own factor :math:`\|B^t\|/\|B^{t-1}\|` is nearer to 1 than to the late one, in
            logs; 0 if none.
        settled: whether the factor of the last layer is within 1% of the late one.
    """

    log_late_factor: float
    log_norms: Float[Tensor, " layers"]
    log_delay: float
    log_delay_lower_bound: float
    length: int
    settled: bool


def predicted_decay(P0: Any, layers: int) -> Float[Tensor, " layers"]:
    r""":math:`\log\|CP_0^t\|_2` for t = 1 to ``layers``: the most that can be left of a residual of norm 1. **Exact**.

    By repeated multiplication with the scale kept as a logarithm. -inf from where the power is zero.

    Example:
        Equal rows leave nothing; the mean of itself and the mean of all halves a residual each time.

        >>> n = 4
        >>> half = (torch.eye(n) + torch.ones(n, n) / n).double() / 2
        >>> [round(value, 9) for value in predicted_decay(half, 3).exp().tolist()]
        [0.5, 0.25, 0.125]
    """
    P = dense_stochastic(P0)
    eye = torch.eye(P.shape[0], dtype=torch.float64, device=P.device)
    return torch.stack([log + torch.linalg.matrix_norm(CY, 2).log() for CY, log in _powers(P, eye, layers)])


def simulated_residuals(P0: Any, R: Float[Tensor, "tokens dim"], layers: int) -> Float[Tensor, " layers"]:
    r""":math:`\log\|CP_0^tR\|_F` for t = 1 to ``layers``: this residual, with values that keep norms. **Exact**.

    Example:
        >>> causal = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
        >>> logs = simulated_residuals(causal, torch.tensor([[1.0], [-1.0]]), 2000)
        >>> round((logs[-1] - logs[-2]).exp().item(), 12)
        0.5
    """
    P = dense_stochastic(P0)
    start = R.detach().to(torch.float64)
    return torch.stack([log + torch.linalg.vector_norm(CY).log() for CY, log in _powers(P, start, layers)])


def transient(P0: Any, layers: int) -> Transient:
    r"""The transient of :math:`B = CP_0`, followed over ``layers`` layers.

    **Exact** along the horizon; ``log_delay_lower_bound`` is a **Bound** for every depth. With :math:`\lambda_2 = 0`
    there is no late law to compare with and the delay is nan.

    Example:
        A normal matrix has none.

        >>> half = (torch.eye(4) + torch.ones(4, 4) / 4).double() / 2
        >>> found = transient(half, 8)
        >>> found.length, round(found.log_delay, 9), found.settled
        (0, 0.0, True)
    """
    late = second_mode(P0).factor
    log_norms = predicted_decay(P0, layers)
    if late == 0:
        return Transient(-math.inf, log_norms, math.nan, math.nan, 0, True)
    steps = torch.arange(1, layers + 1, dtype=torch.float64, device=log_norms.device)
    log_late = math.log(late)
    own = torch.cat([log_norms[:1], log_norms.diff()])
    slow = (own > log_late / 2).nonzero()
    length = int(slow[-1]) + 1 if slow.numel() and log_late < 0 else 0
    delay = float((log_norms - steps * log_late).max())
    settled = abs(float(own[-1]) - log_late) < math.log(1.01)
    return Transient(log_late, log_norms, delay, kreiss_lower_bound(P0, late), length, settled)


def kreiss_lower_bound(P0: Any, late_factor: float) -> float:
    r"""Lower bound on :math:`\log\sup_t\|B^t\|/\rho^t`, from the resolvent.

    **Bound**: the largest :math:`(|z|-\rho)\|(z-B)^{-1}\|` on a grid of z outside the late factor rho. Every z gives
    one, because :math:`\|(z-B)^{-1}\| \le \sum_t\|B^t\||z|^{-t-1}`. B is real, so the upper half plane is enough. At
    least 0, which t = 0 gives.

    Example:
        >>> half = (torch.eye(4) + torch.ones(4, 4) / 4).double() / 2
        >>> abs(kreiss_lower_bound(half, 0.5)) < 1e-9
        True
    """
    B = centred(dense_stochastic(P0)).to(torch.complex128)
    eye = torch.eye(B.shape[0], dtype=B.dtype, device=B.device)
    best = 0.0
    for radius in late_factor * (1 + torch.logspace(-3, 1, _RADII, dtype=torch.float64)):
        for angle in torch.linspace(0, math.pi, 9, dtype=torch.float64):
            z = torch.polar(radius, angle)
            values = torch.linalg.svdvals(z * eye - B)
            # rounding could have made the least one too small, and the bound too large
            least = float(values[-1] + 4 * eye.shape[0] * torch.finfo(torch.float64).eps * values[0])
            best = max(best, math.log(float(radius) - late_factor) - math.log(least))
    return best


def numerical_radius_bound(P0: Any) -> float:
    r"""Upper bound w on the numerical radius of :math:`B = CP_0`, so that :math:`\|B^t\|_2 \le 2w^t` for every t.

    **Bound** (Berger's power inequality). The numerical range is enclosed in a polygon of 128 supporting lines, at most
    0.03% too wide. Below 1 it proves collapse from the first layer on; for causal masks it may lie above 1.

    Example:
        A normal matrix has its spectral radius.

        >>> half = (torch.eye(4) + torch.ones(4, 4) / 4).double() / 2
        >>> 0.5 <= numerical_radius_bound(half) < 0.5002
        True
    """
    B = centred(dense_stochastic(P0)).to(torch.complex128)
    angles = torch.linspace(0, math.pi, _ANGLES + 1, dtype=torch.float64)
    supports = []
    for angle in angles:
        turned = torch.polar(torch.ones((), dtype=torch.float64), angle) * B
        supports.append(float(torch.linalg.eigvalsh((turned + turned.mH) / 2)[-1]))
    return max(supports) / math.cos(math.pi / (2 * _ANGLES))


def _powers(P: Tensor, start: Tensor, layers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """CP^t start over a scale, and the log of the scale, for t = 1 to layers.

    What all rows share does not matter, and which part of it is taken away does: removing the mean puts rounding of
    the size of the largest row into the smallest, and a long transient brings that back. A token that sees only
    itself never changes; relative to it nothing is subtracted at all, and every entry keeps its own digits.
    """
    if layers < 1:
        raise InputError(f"The decay over {layers} layers was asked for. Expected at least one.")
    fixed = (P.diagonal() == 1).nonzero()
    anchor = int(fixed[0]) if fixed.numel() else None

    def less_common(Y: Tensor) -> Tensor:
        return centred(Y) if anchor is None else Y - Y[anchor]

    direction, log_scale = unit(less_common(start))
    for _ in range(layers):
        direction, log_gain = unit(less_common(P @ direction))
        log_scale = log_scale + log_gain
        yield centred(direction), log_scale
