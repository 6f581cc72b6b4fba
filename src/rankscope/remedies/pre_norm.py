"""Norms moved from the sum to the branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankscope._citations import Cite
from rankscope.errors import InputError, UnsupportedOperationError
from rankscope.models.design import Design
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.branch_grafts import PreNorming


def _design(design: Design, strength: float) -> Mapping[str, Any]:
    if design.norm_place != "post":
        raise UnsupportedOperationError(
            f"pre_norm needs post-norm, and the norms of this design are: {design.norm_place}."
        )
    return {"norm_place": "pre"}


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
    design=_design,
)
def pre_norm(case: RemedyCase) -> Sequence[Step]:
    """A post-norm model run as a pre-norm one, with fresh norms (no weights) before the branches."""
    if case.strength != 1.0:
        raise InputError(f"strength={case.strength!r}: pre_norm is applied whole; leave strength out.")
    return (PreNorming(),)
