"""Attention to neighbours only."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.errors import InputError
from rankscope.masks import parse_mask
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.operation import Operation


@remedy(
    claim="Local masks slow collapse, but do not prevent it as long as some token can reach every other token through "
    "the layers.",
    claims_tokens=True,
    cites=(Cite("wu2024role", "thm. 1"),),
    needs={"attention"},
    strength=4.0,
    strength_means="w: a token sees itself and at most w tokens on each side",
    neutral=None,
    learnable=False,
    parameters="none",
    flops="none; fewer with a kernel for it: 2 n w d L instead of 2 n^2 d L",
    design=lambda design, width: {
        "mask": f"window({int(width)})" if design.is_complete else f"({design.mask}) & window({int(width)})"
    },
)
def local_mask(case: RemedyCase) -> Sequence[Step]:
    """The model's own mask, intersected with a window of neighbours."""
    if case.strength != int(case.strength) or case.strength < 0:
        raise InputError(f"strength={case.strength!r}: the window is a whole number of tokens from 0.")
    return (Operation(mask=parse_mask(f"window({int(case.strength)})"), mask_mode="intersect"),)
