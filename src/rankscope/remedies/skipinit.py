"""A learned gain on every branch, initialised at zero."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.branch_grafts import BranchGains


@remedy(
    claim="A learned gain per branch, initialised at zero, makes every block the identity at initialisation, so that "
    "very deep networks train; with ReZero, without norms or warmup.",
    claims_tokens=False,
    cites=(Cite("de2020batch"), Cite("bachlechner2021rezero")),
    needs={"skips", "training"},
    strength=0.0,
    strength_means="the initial gain",
    neutral=1.0,
    learnable=True,
    parameters="2 L",
    flops="2 n d L products",
)
def skipinit(case: RemedyCase) -> Sequence[Step]:
    """Every branch times its own gain, initially 0 (SkipInit, ReZero)."""
    return (BranchGains(case.view, case.strength, case.strength, learnable=case.learnable),)
