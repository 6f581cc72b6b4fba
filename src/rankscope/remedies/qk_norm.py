"""Normalised queries and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankscope._citations import Cite
from rankscope.errors import UnsupportedOperationError
from rankscope.models.design import Design
from rankscope.remedies._present import QUERY_KEY_NORM, refuse_norm_in_attention
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.attention_grafts import QueryKeyNorm


def _design(design: Design, gain: float) -> Mapping[str, Any]:
    if design.qk_norm:
        raise UnsupportedOperationError("qk_norm: the queries and keys of this design are already normed.")
    return {"qk_norm": gain}


@remedy(
    claim="Normalising queries and keys bounds every score by the square root of the head width, whatever the size of "
    "the weights, so that attention does not saturate and training at high learning rates does not diverge.",
    claims_tokens=False,
    cites=(Cite("henry2020querykey"), Cite("dehghani2023scaling")),
    needs={"attention", "training"},
    strength=1.0,
    strength_means="g in the scores g sqrt(d) cos(q, k), with d the width of a head",
    neutral=None,
    learnable=True,
    parameters="none; L if learned (the papers: one per head, or two vectors of the head's width)",
    flops="2 n d L products and 2 n h L norms",
    design=_design,
)
def qk_norm(case: RemedyCase) -> Sequence[Step]:
    """Scores g sqrt(d) cos(q, k), with the queries and keys of each head normalised (RMSNorm, no weights)."""
    refuse_norm_in_attention(case.view, QUERY_KEY_NORM, "norms on its queries and keys")
    return (QueryKeyNorm(case.view, case.strength, learnable=case.learnable),)
