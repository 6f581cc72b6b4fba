r"""Equiangular tokens with identity values, in continuous depth: how post- and pre-norm differ.

With n tokens of pairwise cosine :math:`\rho` on the sphere and attention :math:`a = e^{\beta\rho}/(e^\beta +
(n-1)e^{\beta\rho})` to each other token, post-norm gives :math:`\dot\rho = 2a(1-\rho)(1+(n-1)\rho)`, so that
:math:`1-\rho` falls like :math:`e^{-2t}`. In pre-norm the length r of a token grows and slows this, :math:`\dot\rho/r`,
and :math:`1-\rho` falls like :math:`1/t^2`.
"""

from __future__ import annotations

import math
from typing import Literal

from rankscope._citations import Cite
from rankscope.theory.designs.design import Design
from rankscope.theory.oracles._spec import BARE_BRANCHES, COMPLETE, ORACLES, POSITION_FREE, Assumption, Oracle

Place = Literal["pre", "post"]


def rates(cosine: float, length: float, tokens: int, beta: float, place: Place) -> tuple[float, float]:
    """Time derivatives of the cosine and of the length of a token. **Exact** for equiangular tokens."""
    # divided by e^beta, so that nothing overflows
    other = math.exp(beta * (cosine - 1)) / (1 + (tokens - 1) * math.exp(beta * (cosine - 1)))
    turning = 2 * other * (1 - cosine) * (1 + (tokens - 1) * cosine)
    if place == "post":
        return turning, 0.0
    own = 1 - (tokens - 1) * other
    return turning / length, own + (tokens - 1) * other * cosine


def cosine_at(
    time: float, tokens: int, initial_cosine: float, *, beta: float = 1.0, place: Place = "post", steps: int = 4000
) -> float:
    """Cosine after a time, by Runge and Kutta's fourth-order rule. **Exact** up to its step.

    Example:
        >>> late = [1 - cosine_at(t, 8, 0.2) for t in (6.0, 7.0)]
        >>> round(late[1] / late[0], 3), round(math.exp(-2), 3)
        (0.135, 0.135)
    """
    rho, length, h = initial_cosine, 1.0, time / steps
    for _ in range(steps):
        k1 = rates(rho, length, tokens, beta, place)
        k2 = rates(rho + h / 2 * k1[0], length + h / 2 * k1[1], tokens, beta, place)
        k3 = rates(rho + h / 2 * k2[0], length + h / 2 * k2[1], tokens, beta, place)
        k4 = rates(rho + h * k3[0], length + h * k3[1], tokens, beta, place)
        rho += h / 6 * (k1[0] + 2 * k2[0] + 2 * k3[0] + k4[0])
        length += h / 6 * (k1[1] + 2 * k2[1] + 2 * k3[1] + k4[1])
    return rho


def _is_normed(design: Design, tokens: int) -> tuple[bool, str]:
    return design.norm_place in ("pre", "post"), design.norm_place


def _has_skip(design: Design, tokens: int) -> tuple[bool, float]:
    return design.attention_skip == 1, design.attention_skip


def _values(design: Design, tokens: int) -> dict[str, float]:
    """The power with which 1 - cosine falls: of e^t for post-norm, of t for pre-norm."""
    return {"late_exponent": -2.0} if design.norm_place == "post" else {"late_power": -2.0}


ORACLES.add(
    "karagodin_2025_equiangular",
    Oracle(
        name="karagodin_2025_equiangular",
        summary="Continuous depth, identity values: exponential for post-norm, 1/t^2 for pre-norm",
        assumptions=(
            COMPLETE,
            POSITION_FREE,
            Assumption("a norm, before or after", _is_normed),
            Assumption("whole skip around attention", _has_skip),
            BARE_BRANCHES,
        ),
        cites=(Cite("karagodin2025"),),
        values=_values,
    ),
)
