"""Branches of a block that is called repeatedly, scaled down by the number of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.errors import UnsupportedOperationError
from rankscope.models.view import ModelView
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.branch_grafts import BranchGains
from rankscope.surgery.graft import Spot


@remedy(
    claim="The updates of a block that is called N times are correlated, so the stream grows like N rather than "
    "sqrt(N). Branches need a factor 1/N for the calls in addition to 1/sqrt(L) for the L different blocks.",
    claims_tokens=False,
    cites=(Cite("wang2026looped"),),
    needs={"skips"},
    strength=1.0,
    strength_means="lambda in the factor lambda / (N sqrt(L)), for a block called N times and L different blocks",
    neutral=None,
    learnable=True,
    parameters="none; 2 N L if learned",
    flops="2 n d N L products",
)
def loop_scale(case: RemedyCase) -> Sequence[Step]:
    """Every branch times lambda/(N sqrt(L)), for L different blocks, this one called N times."""
    factors = _factors(case.view)

    def gain(spot: Spot) -> float:
        return case.strength * factors[spot.stack, spot.layer]

    return (BranchGains(case.view, gain, gain, learnable=case.learnable),)


def _factors(view: ModelView) -> dict[tuple[str | None, int], float]:
    """1/(N sqrt(L)) by stack and block."""
    factors, most = {}, 1
    for stack in view.stacks:
        calls = Counter(call.module_name for call in stack.calls)
        most = max(most, *calls.values())
        different = sum(len(call.blocks) for call in {call.module_name: call for call in stack.calls}.values())
        for call in stack.calls:
            for block in range(len(call.blocks)):
                factors[stack.name, call.first_layer + block] = different**-0.5 / calls[call.module_name]
    if most == 1:
        raise UnsupportedOperationError(
            f"loop_scale needs shared blocks: no block of this {type(view.model).__name__} is called more than once in "
            "a pass. For different blocks there is residual_scale."
        )
    return factors
