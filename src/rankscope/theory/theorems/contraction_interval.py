"""Two-sided, from the layer's own attention and values: how much a residual is stretched or shrunk. Ours."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rankscope.theory.contraction import Gains
from rankscope.theory.theorems._evaluation import Evaluation, LayerBound, claim, log
from rankscope.theory.theorems._quantities import LayerQuantities, Network
from rankscope.theory.theorems._spec import theorem


@theorem(
    cites=(),
    statement=r"\sigma_{\min}(W_O)^2\sum_{h,k}s_{h,n-k}^2\sigma_{h,k}^2 \le \Big\|C\sum_hP_hRW_h\Big\|_F^2"
    r"\le \sigma_{\max}(W_O)^2\sum_{h,k}s_{h,k}^2\sigma_{h,k}^2",
    hypotheses=("rows of attention add up to one",),
    needs="activations",
    sides="two-sided",
)
def contraction_interval(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
    r"""Between what and what attention multiplies a residual, given its attention and its values.

    **Bound**, both ways and certified, on :math:`\|R'\|_F/\|R\|_F` from what attention reads to what it gives: the
    attention branch, whatever stands around it. The upper end is the least of this, the bound for any residual, and the
    one that Lanczos gives but for a chance of 1e-12. Over the depth the ends multiply; with skips, MLPs or norms
    between, the product is that of the branches.
    """
    bounds = tuple(_layer(layer) for layer in layers)
    known = [b for b in bounds if b.log_upper is not None and b.log_lower is not None and b.log_measured is not None]
    depth = None
    if known and len(known) == len(layers):
        depth = LayerBound(
            None,
            log_upper=sum(b.log_upper for b in known if b.log_upper is not None),
            log_lower=sum(b.log_lower for b in known if b.log_lower is not None),
            log_measured=sum(b.log_measured for b in known if b.log_measured is not None),
            hypotheses=(claim("nothing between attention layers", bool(network.pure)),),
            at_floor=any(b.at_floor for b in known),
        )
    return Evaluation("contraction_interval", "residual after attention over before", bounds, depth, (), _said(known))


def _layer(layer: LayerQuantities) -> LayerBound:
    seen = layer.passage
    if seen is None:
        return LayerBound(layer.layer)
    rows = claim("rows of attention add up to one", seen.gains is not None)
    if seen.gains is None:
        return LayerBound(layer.layer, hypotheses=(rows,))
    lower, upper = narrowest(seen.gains)
    return LayerBound(
        layer.layer,
        log_upper=log(upper),
        log_lower=log(lower),
        log_measured=log(seen.gains.measured),
        hypotheses=(rows,),
        at_floor=seen.at_floor,
    )


def narrowest(gains: Gains) -> tuple[float, float]:
    """The largest lower and the smallest upper end known of this residual."""
    uppers = [gains.any_residual.upper, gains.given_values.upper]
    if gains.ends is not None:
        uppers.append(gains.ends.likely_upper)
    return max(gains.any_residual.lower, gains.given_values.lower), min(uppers)


def _said(known: Sequence[LayerBound]) -> str:
    if not known:
        return "No layer's attention adds up to one along its rows."
    ten = math.log(10)
    slacks = sorted(b.log_slack / ten for b in known if b.log_slack is not None)
    widths = sorted(b.log_width / ten for b in known if b.log_width is not None)
    inside = sum(not b.is_violated for b in known)
    shows = sum(b.log_upper is not None and b.log_upper < 0 for b in known)
    return (
        f"The measured contraction lies inside the interval in {inside} of {len(known)} layers, at most "
        f"10^{slacks[-1]:.2g} below its upper end; intervals are {widths[0]:.1f} to {widths[-1]:.1f} decades wide. The "
        f"upper end alone shows that attention shrinks any such residual in {shows} layers."
    )
