"""Norms on the output of branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankscope._citations import Cite
from rankscope.errors import UnsupportedOperationError
from rankscope.models.design import Design
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.branch_grafts import BranchNorm


def _design(design: Design, gain: float) -> Mapping[str, Any]:
    if design.norm_place != "pre":
        raise UnsupportedOperationError(
            f"peri_ln needs pre-norm, and the norms of this design are: {design.norm_place}."
        )
    if design.branch_norm:
        raise UnsupportedOperationError("peri_ln: this design already has a norm on its branches.")
    return {"branch_norm": True, "attention_scale": gain, "mlp_scale": gain}


@remedy(
    claim="A second norm on the output of each branch lets the variance of a pre-norm stream grow linearly with depth "
    "instead of exponentially, which makes training more stable.",
    claims_tokens=False,
    cites=(Cite("kim2025periln"), Cite("ding2021cogview", "sandwich layernorm")),
    needs={"skips", "pre-norm", "sequential"},
    strength=1.0,
    strength_means="root mean square of the output of every branch",
    neutral=None,
    learnable=True,
    parameters="none; 2 L if learned (the paper: 2 d L)",
    flops="2 L norms",
    design=_design,
)
def peri_ln(case: RemedyCase) -> Sequence[Step]:
    """A pre-norm model with a second norm (RMSNorm, no weights) after every branch (Peri-LN, sandwich norm)."""
    return (BranchNorm(case.view, case.strength, learnable=case.learnable),)
