r"""Cosine of two outputs of one attention layer whose scores grow with the logarithm of the context length.

Scores are :math:`\gamma\log n` times cosines of tokens of pairwise cosine :math:`\rho`. As n grows, each attends to all
equally below :math:`\gamma_c = 1/(1-\rho)`, half to itself and half to all at it, and only to itself above it.
"""

from __future__ import annotations

import math

from rankscope._citations import Cite
from rankscope.ext.theory.oracles._spec import COMPLETE, ORACLES, POSITION_FREE, Oracle
from rankscope.models.design import Design


def critical_scale(cosine: float) -> float:
    r""":math:`\gamma_c = 1/(1-\rho)`; inf at collapse."""
    return 1 / (1 - cosine) if cosine < 1 else math.inf


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
