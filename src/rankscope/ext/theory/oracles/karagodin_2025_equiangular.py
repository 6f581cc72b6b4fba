r"""Equiangular tokens with identity values, in continuous depth: how post- and pre-norm differ.

With n tokens of pairwise cosine :math:`\rho` on the sphere and attention :math:`a = e^{\beta\rho}/(e^\beta +
(n-1)e^{\beta\rho})` to each other token, post-norm gives :math:`\dot\rho = 2a(1-\rho)(1+(n-1)\rho)`, so that
:math:`1-\rho` falls like :math:`e^{-2t}`. In pre-norm the length r of a token grows and slows this, :math:`\dot\rho/r`,
and :math:`1-\rho` falls like :math:`1/t^2`.
"""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.ext.theory.oracles._spec import BARE_BRANCHES, COMPLETE, ORACLES, POSITION_FREE, Assumption, Oracle
from rankscope.models.design import Design


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
