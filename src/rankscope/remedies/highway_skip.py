"""A post-norm skip that outweighs its branch by the number of branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankscope._citations import Cite
from rankscope.errors import UnsupportedOperationError
from rankscope.models.design import Design
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.branch_grafts import BranchGains, NormedReads
from rankscope.surgery.graft import Spot


def _design(design: Design, strength: float) -> Mapping[str, Any]:
    if design.norm_place != "post":
        raise UnsupportedOperationError(
            f"highway_skip needs post-norm, and the norms of this design are: {design.norm_place}."
        )
    if not design.embedding_norm:
        raise UnsupportedOperationError(
            "highway_skip norms what branches read, which changes the first block of a design whose first tokens are "
            "not normed, and a design cannot express that."
        )
    alpha = strength * design.depth * (1 if design.mlp == "none" else 2)
    return {"attention_skip": alpha * design.attention_skip, "mlp_skip": alpha * design.mlp_skip}


@remedy(
    claim="Gradients vanish along the skips of a post-norm stack. Weighting the skip by the number of branches and "
    "normalising inside each branch preserves them, so that 1,000 layers train without special warmup.",
    claims_tokens=False,
    cites=(Cite("chen2026postlayernorm", "Keel, read as an abstract"),),
    needs={"skips", "post-norm"},
    strength=1.0,
    strength_means="s in the factor s B on the stream, with B the number of branches of the stack",
    neutral=None,
    learnable=False,
    parameters="none",
    flops="2 n d L products and 2 L norms",
    design=_design,
)
def highway_skip(case: RemedyCase) -> Sequence[Step]:
    r"""Sums alpha x + f(LN(x)) before the norm, with alpha the number of branches of the stack (Keel).

    The norm inside the branch is a LayerNorm without weights.
    """
    branches = {stack.name: sum(len(plan.skips) for plan in stack.plans) for stack in case.view.stacks}

    def alpha(spot: Spot) -> float:
        return case.strength * branches[spot.stack]

    return BranchGains(case.view, 1.0, 1.0, stream=alpha), NormedReads()
