r"""Cosine of two outputs of one attention layer whose scores grow with the logarithm of the context length.

Scores are :math:`\gamma\log n` times cosines of tokens of pairwise cosine :math:`\rho`. As n grows, each attends to all
equally below :math:`\gamma_c = 1/(1-\rho)`, half to itself and half to all at it, and only to itself above it.
"""

from __future__ import annotations

import math

from rankscope._citations import Cite
from rankscope.theory.designs.design import Design
from rankscope.theory.oracles._spec import COMPLETE, ORACLES, POSITION_FREE, Oracle


def critical_scale(cosine: float) -> float:
    r""":math:`\gamma_c = 1/(1-\rho)`; inf at collapse."""
    return 1 / (1 - cosine) if cosine < 1 else math.inf


def output_cosine(gamma: float, cosine: float) -> float:
    r"""Cosine of two outputs as n grows: 1, :math:`4\rho/(1+3\rho)`, :math:`\rho` for gamma below, at, above critical.

    **Exact** in that limit, for rho above 0.

    Example:
        >>> output_cosine(1.0, 0.5), output_cosine(2.0, 0.5), output_cosine(3.0, 0.5)
        (1.0, 0.8, 0.5)
    """
    critical = critical_scale(cosine)
    if gamma < critical:
        return 1.0
    return cosine if gamma > critical else 4 * cosine / (1 + 3 * cosine)


def output_cosine_at(gamma: float, cosine: float, tokens: int) -> float:
    """The same for a finite number of equiangular tokens. **Exact**.

    Example:
        >>> abs(output_cosine_at(2.0, 0.5, 10**9) - 0.8) < 1e-6
        True
    """
    # each of the others relative to oneself
    ratio = math.exp(-gamma * (1 - cosine) * math.log(tokens))
    own = 1 / (1 + (tokens - 1) * ratio)
    other = ratio * own
    # outputs o_i = own x_i + other (sum of the rest); sums of weights are 1
    norm = own**2 + (tokens - 1) * other**2 + cosine * (1 - own**2 - (tokens - 1) * other**2)
    shared = 2 * own * other + (tokens - 2) * other**2
    return (shared + cosine * (1 - shared)) / norm


def _values(design: Design, tokens: int) -> dict[str, float]:
    return {"critical_log_scale": critical_scale(design.initial_cosine)}


ORACLES.add(
    "chen_2026_context_length",
    Oracle(
        name="chen_2026_context_length",
        summary="One attention layer as the context grows: the score scale at which it stops averaging",
        assumptions=(COMPLETE, POSITION_FREE),
        cites=(Cite("chen2026"),),
        values=_values,
    ),
)
