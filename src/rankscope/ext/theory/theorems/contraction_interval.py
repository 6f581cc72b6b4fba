"""Two-sided bounds on how much attention changes a residual, from the layer's own attention and values. Ours."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rankscope.ext.theory.theorems._quantities import LayerQuantities, Network
from rankscope.ext.theory.theorems._spec import (
    Evaluation,
    LayerBound,
    claim,
    heads_make_it_up,
    log,
    log_ratio,
    powers_of_ten,
    rows_add_up,
    theorem,
)


@theorem(
    cites=(),
    statement=r"\sigma_{\min}(W_O)\Big(\sum_{h,k}s_{h,n-k}^2\sigma_{h,k}^2\Big)^{1/2} - \|\ell\|_F \le \|R'\|_F"
    r"\le \sigma_{\max}(W_O)\Big(\sum_{h,k}s_{h,k}^2\sigma_{h,k}^2\Big)^{1/2} + \|\ell\|_F",
    hypotheses=("attention stays within the tokens that count", "what attention gives is the sum of its heads"),
    sides="two-sided",
)
def contraction_interval(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
    r"""Lower and upper bound on the factor by which attention changes the residual, given its attention and values.

    **Bound**, two-sided and certified, on :math:`\|R'\|_F/\|R\|_F` from the input of attention to its output, both as
    the model computed them: the attention branch, whatever surrounds it. Rows of attention need not sum to one:
    with a sink, rows contain different amounts of what all tokens share. This leak :math:`\ell` widens both ends (see
    :mod:`rankscope.ext.theory.contraction`). The upper end is the smaller of this and the bound for any residual. Over
    the depth the ends multiply; with skips, MLPs or norms
    between, the product is that of the branches.
    """
    bounds = tuple(_layer(layer) for layer in layers)
    depth = LayerBound(
        None,
        log_upper=sum(b.log_upper for b in bounds if b.log_upper is not None),
        log_lower=sum(b.log_lower for b in bounds if b.log_lower is not None),
        log_measured=sum(b.log_measured for b in bounds if b.log_measured is not None),
        hypotheses=(claim("nothing between attention layers", network.pure),),
        at_floor=any(b.at_floor for b in bounds),
        log_rounding=sum(b.log_rounding for b in bounds),
    )
    return Evaluation(
        "contraction_interval", "residual after attention over before", bounds, depth, (), _sentence(bounds, layers)
    )


def _layer(layer: LayerQuantities) -> LayerBound:
    seen = layer.passage
    lower, upper = seen.gains.narrowest
    return LayerBound(
        layer.layer,
        log_upper=log(upper),
        log_lower=log(lower),
        log_measured=log_ratio(seen.frobenius_out, seen.frobenius_in),
        hypotheses=heads_make_it_up(seen),
        at_floor=seen.at_floor,
        log_rounding=seen.log_rounding,
    )


def _sentence(bounds: Sequence[LayerBound], layers: Sequence[LayerQuantities]) -> str:
    known = [b for b in bounds if not b.at_floor]
    if not known:
        return "The residual after attention is rounding in every layer: nothing can be compared."
    ten = math.log(10)
    slacks = sorted(b.log_slack / ten for b in known if b.log_slack is not None)
    widths = sorted(b.log_width / ten for b in known if b.log_width is not None)
    inside = sum(not b.is_violated for b in known)
    shows = sum(b.log_upper is not None and b.log_upper < 0 for b in known)
    sink = ""
    if not all(rows_add_up(x.passage).holds for x in layers):
        rows = max(x.passage.row_gap for x in layers)
        leak = max(x.passage.gains.leak for x in layers)
        sink = (
            f" Rows of attention miss 1 by up to {rows:.2g}: what tokens share leaks into the residual and widens both "
            f"ends by up to {powers_of_ten(log(leak))}."
        )
    return (
        f"The measured contraction lies inside the interval in {inside} of {len(known)} layers, at most "
        f"10^{slacks[-1]:.2g} below its upper end; {_width_words(widths)}. The upper end alone shows that attention "
        f"shrinks any such residual in {shows} layers.{sink}"
    )


def _width_words(widths: list[float]) -> str:
    """How wide the intervals are; with a learned sink the lower end can be zero, and the interval has no width."""
    finite = [width for width in widths if math.isfinite(width)]
    if not finite:
        return "no interval has a lower end above zero"
    words = f"intervals are {finite[0]:.1f} to {finite[-1]:.1f} decades wide"
    return words if len(finite) == len(widths) else f"{words} ({len(widths) - len(finite)} have no lower end)"
