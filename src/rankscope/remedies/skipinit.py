"""A gain on every branch that begins at zero and is learned."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.branch_grafts import BranchGains


@remedy(
    claim="A learned gain per branch that begins at zero makes every block the identity at first, and very deep "
    "networks train, with ReZero without norms or warm-up.",
    claims_tokens=False,
    cites=(Cite("de2020batch"), Cite("bachlechner2021rezero")),
    needs={"skips", "training"},
    strength=0.0,
    strength_means="the gain at first",
    neutral=1.0,
    learnable=True,
    parameters="2 L",
    flops="2 n d L products",
    design=lambda design, gain: {
        "attention_scale": gain * design.attention_scale,
        "mlp_scale": gain * design.mlp_scale,
    },
)
def skipinit(case: RemedyCase) -> Sequence[Step]:
    """Every branch times a gain of its own, 0 at first (SkipInit, ReZero)."""
    return (BranchGains(case.view, case.strength, case.strength, learnable=case.learnable),)
