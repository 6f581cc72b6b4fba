r"""Least entropy of a row of attention whose logits have a bounded spectral norm.

:math:`\mathrm{Ent} \ge \log(1+(T-1)b) + \sigma\sqrt{T(T-1)}\,b/(1+(T-1)b)`, :math:`b = e^{-\sigma\sqrt{T/(T-1)}}`:
reached by a row with one logit high and the others equal.
"""

from __future__ import annotations

import math

from rankscope._citations import Cite
from rankscope.ext.theory.oracles._spec import ORACLES, Assumption, Oracle
from rankscope.models.design import Design


def least_entropy(sigma: float, tokens: int) -> float:
    """Entropy, in nats, below which no row of ``tokens`` logits of norm ``sigma`` falls. **Bound**, reached.

    Example:
        >>> round(least_entropy(0.0, 8), 12) == round(math.log(8), 12)
        True
    """
    b = math.exp(-sigma * math.sqrt(tokens / (tokens - 1)))
    total = 1 + (tokens - 1) * b
    return math.log(total) + sigma * math.sqrt(tokens * (tokens - 1)) * b / total


def _values(design: Design, tokens: int) -> dict[str, float]:
    """For a row of independent scores: their norm is score_std sqrt(T)."""
    return {"least_row_entropy": least_entropy(design.score_std * math.sqrt(tokens), tokens)}


def _is_normed(design: Design, tokens: int) -> tuple[bool, str]:
    return design.norm_place != "none", design.norm_place


ORACLES.add(
    "zhai_2023_entropy",
    Oracle(
        name="zhai_2023_entropy",
        summary="Least entropy of an attention row for scores of this size",
        assumptions=(Assumption("normed tokens", _is_normed),),
        cites=(Cite("zhai2023stabilizing"),),
        values=_values,
    ),
)
