"""Norms moved from the sum to the branch."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.errors import InputError
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.branch_grafts import PreNorming


@remedy(
    claim="With norms inside the branches, tokens approach each other polynomially in depth instead of exponentially, "
    "and gradients at initialisation are small enough to train without warmup.",
    claims_tokens=True,
    cites=(Cite("xiong2020layer"), Cite("karagodin2025")),
    needs={"skips", "post-norm"},
    strength=1.0,
    strength_means="always 1: a norm is in one place or the other",
    neutral=None,
    learnable=False,
    parameters="none",
    flops="one more norm per stack",
)
def pre_norm(case: RemedyCase) -> Sequence[Step]:
    """A post-norm model run as a pre-norm one, with fresh norms (no weights) before the branches."""
    if case.strength != 1.0:
        raise InputError(f"strength={case.strength!r}: pre_norm is applied whole; leave strength out.")
    return (PreNorming(),)
