"""Attention scores bounded by a cap."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.errors import InputError
from rankscope.remedies._present import refuse_cap
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.attention_grafts import ScoreCap


@remedy(
    claim="Scores pass through c tanh(s / c), so that none exceeds c, however large queries and keys become. At "
    "initialisation scores are far below c and nothing changes.",
    claims_tokens=False,
    cites=(Cite("gemma2024"),),
    needs={"attention", "training"},
    strength=50.0,
    strength_means="c in c tanh(s / c)",
    neutral=None,
    learnable=False,
    parameters="none",
    flops="n^2 h L hyperbolic tangents; no fused kernel",
)
def logit_softcap(case: RemedyCase) -> Sequence[Step]:
    """Attention scores, position bias included, as c tanh(s / c) (soft-capping)."""
    if case.strength <= 0:
        raise InputError(f"strength={case.strength!r}: the cap is a number above 0.")
    refuse_cap(case.view)
    return (ScoreCap(case.strength),)
