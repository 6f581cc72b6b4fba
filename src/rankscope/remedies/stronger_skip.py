"""A larger gain on the skip."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.operation import Operation


@remedy(
    claim="The larger the skip relative to its branch, the more layers it takes until tokens become equal.",
    claims_tokens=True,
    cites=(Cite("giorlandino2026"), Cite("dong2021attention")),
    needs={"skips"},
    strength=2.0,
    strength_means="gain on the stream at every skip",
    neutral=1.0,
    learnable=False,
    parameters="none",
    flops="2 n d L products",
)
def stronger_skip(case: RemedyCase) -> Sequence[Step]:
    """The stream times a gain above 1 at every skip."""
    return (Operation(attention_skip=case.strength, mlp_skip=case.strength),)
