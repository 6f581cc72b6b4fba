"""A stronger skip and smaller weights, both set by depth."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.branch_grafts import BranchGains, MlpWeightGains
from rankscope.surgery.graft import Spot


@remedy(
    claim="Scaling up the post-norm skip and scaling down values, outputs and MLPs bounds the size of an update, so "
    "that Transformers of 1,000 layers train.",
    claims_tokens=False,
    cites=(Cite("wang2022deepnet"),),
    needs={"skips", "post-norm", "mlp"},
    strength=1.0,
    strength_means="exponent of both factors: 0 for no effect, 1 for the paper's values",
    neutral=0.0,
    learnable=False,
    parameters="none",
    flops="2 n d L products",
)
def deepnorm(case: RemedyCase) -> Sequence[Step]:
    r"""Sums alpha x + f(x) before the norm; value, output and MLP weights times beta.

    :math:`\alpha = (2L)^{1/4}` and :math:`\beta = (8L)^{-1/4}` for one stack, the paper's other pairs for an encoder
    with a decoder. Attention is linear in its values, so the two :math:`\beta` of value and output are one factor
    :math:`\beta^2` on its branch, which is the same except for biases; MLP matrices are scaled individually.
    """
    factors = _factors({stack.name: stack.depth for stack in case.view.stacks})

    def alpha(spot: Spot) -> float:
        return float(factors[spot.stack][0] ** case.strength)

    def beta(spot: Spot) -> float:
        return float(factors[spot.stack][1] ** case.strength)

    return BranchGains(case.view, lambda spot: beta(spot) ** 2, 1.0, stream=alpha), MlpWeightGains(beta)


def _factors(depths: dict[str | None, int]) -> dict[str | None, tuple[float, float]]:
    """Alpha and beta of each stack."""
    if depths.keys() == {"encoder", "decoder"}:
        encoder, decoder = depths["encoder"], depths["decoder"]
        both = (encoder**4 * decoder) ** (1 / 16)
        return {
            "encoder": (0.81 * both, 0.87 / both),
            "decoder": ((3 * decoder) ** 0.25, (12 * decoder) ** -0.25),
        }
    return {name: ((2 * depth) ** 0.25, (8 * depth) ** -0.25) for name, depth in depths.items()}
