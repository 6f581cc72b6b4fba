"""Scores at a chosen distance from the temperature at which attention concentrates on one key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope._citations import Cite
from rankscope.errors import UnsupportedOperationError
from rankscope.models.design import Design
from rankscope.remedies._present import QUERY_KEY_NORM, refuse_norm_in_attention
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.attention_grafts import LengthScale, QueryKeyNorm


def critical_score_std(keys: int) -> float:
    r"""Standard deviation :math:`\sqrt{2\log n}` of independent Gaussian scores at which attention freezes.

    **Exact** as n grows.

    Example:
        >>> round(critical_score_std(512), 3), round(critical_score_std(512**4) / critical_score_std(512), 12)
        (3.532, 2.0)
    """
    return math.sqrt(2 * math.log(keys))


def _design(design: Design, strength: float) -> Mapping[str, Any]:
    if not design.is_complete:
        raise UnsupportedOperationError(
            "critical_temperature of a design needs as many keys for every query, and under the mask "
            f"{design.mask} they differ."
        )
    if design.qk_norm:
        raise UnsupportedOperationError("critical_temperature: the queries and keys of this design are already normed.")
    return {"qk_norm": strength * critical_score_std(design.tokens)}


def _critical(keys: Tensor) -> Tensor:
    return torch.sqrt(2 * torch.log(keys))


@remedy(
    claim="Independent scores of unit variance concentrate on one key at the inverse temperature sqrt(2 log n) and "
    "average over all keys far below it. Normalised queries and keys have such scores at initialisation, so this "
    "factor keeps attention at the same distance from the transition at every context length.",
    claims_tokens=True,
    cites=(Cite("derrida1981random"), Cite("giorlandino2026")),
    needs={"attention"},
    strength=1.0,
    strength_means="t in the factor t sqrt(2 log n) on scores of unit variance: below 1 attention averages, above 1 "
    "it concentrates on one key",
    neutral=None,
    learnable=True,
    parameters="none; L if learned",
    flops="3 n d L products and 2 n h L norms",
    design=_design,
)
def critical_temperature(case: RemedyCase) -> Sequence[Step]:
    """Scores t sqrt(2 log n) sqrt(d) cos(q, k), with n the number of visible keys and d the width of a head."""
    refuse_norm_in_attention(case.view, QUERY_KEY_NORM, "norms on its queries and keys")
    return (
        QueryKeyNorm(case.view, 1.0),
        LengthScale(case.view, case.strength, growth=_critical, learnable=case.learnable),
    )
