"""Two-sided bounds near collapse: the cubic law with its remainder. Ours."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rankscope.ext.theory.theorems._cubic import bilinear_attention, network_hypotheses
from rankscope.ext.theory.theorems._quantities import LayerQuantities, Network
from rankscope.ext.theory.theorems._spec import Evaluation, LayerBound, claim, log, theorem


@theorem(
    cites=(),
    statement=r"\Big|\,\|R'\|_F - \Big\|\tfrac1n\sum_h R A_h (R^TR) W_h / \sqrt{d_{qk}}\Big\|_F\Big| \le K\|R\|_F^4",
    hypotheses=("bilinear scores", "complete mask", "rows of attention add up to one"),
    sides="two-sided",
)
def cubic_law_interval(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
    r"""Lower and upper bound on the residual after attention, from the cubic law and its remainder.

    **Bound**, two-sided, on :math:`\|R'\|_F` after attention; see :func:`rankscope.linalg.cubic_law.cubic_interval`.
    Narrow near collapse; far from it the remainder exceeds the leading term, and the lower end is 0.
    """
    bounds = tuple(_layer(layer) for layer in layers)
    known = [b for b in bounds if b.log_upper is not None and not b.at_floor]
    two = [b.log_width for b in known if b.log_width is not None and math.isfinite(b.log_width)]
    said = "Scores with positions, or a mask: the cubic law does not speak of this network."
    if known:
        inside = sum(not b.is_violated for b in known)
        least = f", the narrowest of 10^{min(two) / math.log(10):.2g}" if two else ""
        said = (
            f"The measured residual lies inside in {inside} of {len(known)} layers; the lower end is above zero in "
            f"{len(two)}{least}."
        )
    hypotheses = tuple(h for h in network_hypotheses(network) if "alone" not in h.name)
    return Evaluation("cubic_law_interval", "residual after attention", bounds, None, hypotheses, said)


def _layer(layer: LayerQuantities) -> LayerBound:
    seen = layer.passage
    complete = claim("every row sees every token", seen.graph.complete)
    if seen.log_cubic is None:
        return LayerBound(layer.layer, hypotheses=(complete,))
    lower, upper = seen.log_cubic
    return LayerBound(
        layer.layer,
        log_upper=upper,
        log_lower=lower,
        log_measured=log(seen.frobenius_out),
        hypotheses=(complete, *bilinear_attention(seen)),
        at_floor=seen.at_floor,
        log_rounding=seen.log_rounding,
    )
