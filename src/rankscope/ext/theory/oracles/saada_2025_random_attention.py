r"""Second singular value of attention with independent random scores: a random Markov matrix.

Rows are iid positive numbers over their sum; with mean m and standard deviation s before that, :math:`\sigma = s/m` and
:math:`s_2 \to 2\sigma/\sqrt{T}` while the first stays at 1: the gap grows with the context length, and with it rank
collapse in width.
"""

from __future__ import annotations

import math

from rankscope._citations import Cite
from rankscope.ext.theory.oracles._spec import COMPLETE, ORACLES, POSITION_FREE, Assumption, Oracle
from rankscope.models.design import Design


def second_singular_value(sigma: float, tokens: int) -> float:
    r""":math:`2\sigma/\sqrt{T}`. **Estimate**, correct in the limit of many tokens.

    Example:
        >>> second_singular_value(1.0, 400)
        0.1
    """
    return 2 * sigma / math.sqrt(tokens)


def softmax_sigma(score_std: float) -> float:
    r"""Relative spread :math:`\sqrt{e^{s^2}-1}` of the exponential of Gaussian scores. **Exact**."""
    return math.sqrt(math.expm1(score_std**2))


def _values(design: Design, tokens: int) -> dict[str, float]:
    return {"second_singular_value": second_singular_value(softmax_sigma(design.score_std), tokens)}


def _is_normed(design: Design, tokens: int) -> tuple[bool, str]:
    return design.norm_place != "none", design.norm_place


def _starts_apart(design: Design, tokens: int) -> tuple[bool, float]:
    return design.initial_cosine <= 0.05, design.initial_cosine


ORACLES.add(
    "saada_2025_random_attention",
    Oracle(
        name="saada_2025_random_attention",
        summary="Second singular value of the first attention matrix, scores independent",
        assumptions=(
            COMPLETE,
            POSITION_FREE,
            Assumption("normed tokens", _is_normed),
            Assumption("tokens nearly orthogonal", _starts_apart),
        ),
        cites=(Cite("saada2025mind"), Cite("bordenave2012circular")),
        values=_values,
    ),
)
