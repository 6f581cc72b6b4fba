"""Exponential collapse under a mask, without LayerNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rankscope._citations import Cite
from rankscope.ext.theory.theorems._decay import (
    graph_claims,
    mean_rate,
    slowest,
    structure,
    window_rates,
    windows,
)
from rankscope.ext.theory.theorems._quantities import LayerQuantities, Network
from rankscope.ext.theory.theorems._spec import (
    Evaluation,
    Hypothesis,
    LayerBound,
    alone,
    claim,
    log,
    powers_of_ten,
    rows_add_up,
    theorem,
)


@theorem(
    cites=(Cite("wu2024role", "thm. 1"),),
    statement=r"\mu(X^{(t)}) \le C\prod_{\text{windows of } r \text{ layers}}(1 - \epsilon^r)",
    hypotheses=(
        "one head, attention alone",
        "every token sees itself",
        "a token that reaches every other",
        "attention at least epsilon on every edge",
        "products of values bounded",
        "rows of attention add up to one",
    ),
    sides="upper",
)
def wu_2024_masks(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
    r"""Under a mask in which one token reaches all, attention alone collapses exponentially.

    **Bound** on :math:`\mu` of the stream after t layers. The paper does not give C; the one here comes from its proof:
    the layers are divided into windows, each as short as possible so that some token reaches all in it; a window of
    r layers multiplies the range of every column by at most :math:`1 - \epsilon^r`, and
    :math:`\mu \le \frac{\sqrt n}{2}\sqrt{\sum_j\mathrm{range}_j^2}`, so that

    .. math::

       \mu(X^{(t)}) \le \tfrac{\sqrt n}{2}\Big(\sum_j\mathrm{range}_j(X^{(0)})^2\Big)^{1/2}
       \prod_{\text{windows}}(1 - \epsilon^r)\prod_l\|W^{(l)}\|_2 .

    Under one mask r is the radius of its graph, and the product :math:`(1 - \epsilon^r)^{\lfloor t/r\rfloor}` as in the
    paper. If masks change from layer to layer, the radii of the individual graphs do not bound a window: the graphs
    are multiplied instead.
    """
    seen = [layer.passage for layer in layers]
    least = min(passage.least_edge for passage in seen)
    cut = windows(seen)
    rates = window_rates(cut, least)
    log_values, shrunk, log_rounding, bounds = 0.0, 0.0, 0.0, []
    first = seen[0]
    log_start = 0.5 * math.log(first.tokens) - math.log(2) + log(first.stream_in.column_spread)
    for number, (layer, passage) in enumerate(zip(layers, seen, strict=True)):
        log_values += log(sum(head.value_spectral for head in layer.heads))
        shrunk += rates.get(number, 0.0)
        log_rounding += passage.log_rounding
        bounds.append(
            LayerBound(
                layer.layer,
                log_upper=log_start + shrunk + log_values,
                log_measured=log(passage.stream_out.mu),
                hypotheses=(*graph_claims(passage, strong=False), rows_add_up(passage), alone(passage)),
                log_factor=mean_rate(cut, rates),
                at_floor=passage.at_floor or passage.stream_at_floor,
                log_rounding=log_rounding,
            )
        )
    growth = max(sum(head.value_spectral for head in layer.heads) for layer in layers)
    hypotheses = (
        *structure(network),
        claim("attention alone (no skip, MLP or norm)", network.pure),
        Hypothesis("values of norm at most 1 (enough for bounded products)", growth, 1.0),
    )
    depth = replace(bounds[-1], layer=None, hypotheses=())
    said = f"The smallest attention on an edge is {powers_of_ten(log(least))}: {slowest(cut, least)}."
    return Evaluation("wu_2024_masks", "mu of the stream", tuple(bounds), depth, hypotheses, said, cumulative=True)
