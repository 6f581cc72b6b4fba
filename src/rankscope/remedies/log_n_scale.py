"""Scores that grow with the logarithm of the context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rankscope._citations import Cite
from rankscope.errors import UnsupportedOperationError
from rankscope.models.design import Design
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.attention_grafts import LengthScale


def _design(design: Design, gamma: float) -> Mapping[str, Any]:
    if not design.is_complete:
        raise UnsupportedOperationError(
            f"log_n_scale of a design needs as many keys for every query, and under the mask {design.mask} they differ."
        )
    scores = "qk_norm" if design.qk_norm else "query_std"
    return {scores: gamma * math.log(design.tokens) * getattr(design, scores)}


@remedy(
    claim="Scaling scores by gamma log n keeps attention from becoming uniform in long contexts. Below a critical "
    "gamma, which decreases as tokens differ more, tokens collapse to one; above it, attention keeps them apart.",
    claims_tokens=True,
    cites=(Cite("chen2026"), Cite("nakanishi2025scalable")),
    needs={"attention"},
    strength=1.0,
    strength_means="gamma in the factor gamma log n on the scores, n the number of visible keys",
    neutral=None,
    learnable=True,
    parameters="none; L if learned",
    flops="n d L products",
    design=_design,
)
def log_n_scale(case: RemedyCase) -> Sequence[Step]:
    """Attention scores times gamma log n, with n the number of visible keys."""
    return (LengthScale(case.view, case.strength, learnable=case.learnable),)
