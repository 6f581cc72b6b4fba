"""Exponential collapse under a mask, without LayerNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rankscope._citations import Cite
from rankscope.theory.theorems._decay import graph_claims, log_rate, passages, structure
from rankscope.theory.theorems._evaluation import Evaluation, Hypothesis, LayerBound, claim, log, powers_of_ten
from rankscope.theory.theorems._quantities import LayerQuantities, Network
from rankscope.theory.theorems._spec import theorem


@theorem(
    cites=(Cite("wu2024role", "thm. 1"),),
    statement=r"\mu(X^{(t)}) \le C(1 - \epsilon^r)^{t/r}",
    hypotheses=(
        "one head, attention alone",
        "every token sees itself",
        "a token that reaches every other within r layers",
        "attention at least epsilon on every edge",
        "products of values bounded",
    ),
    needs="attention",
    sides="upper",
)
def wu_2024_masks(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
    r"""Under a mask in which one token reaches all, attention alone collapses exponentially.

    **Bound** on :math:`\mu` of the stream after t layers. The paper leaves C open; the one here comes from its proof:
    r layers multiply the range of every column by at most :math:`1 - \epsilon^r`, and
    :math:`\mu \le \frac{\sqrt n}{2}\sqrt{\sum_j\mathrm{range}_j^2}`, so that

    .. math::

       \mu(X^{(t)}) \le \tfrac{\sqrt n}{2}\Big(\sum_j\mathrm{range}_j(X^{(0)})^2\Big)^{1/2}
       (1 - \epsilon^r)^{\lfloor t/r\rfloor}\prod_l\|W^{(l)}\|_2 .
    """
    seen = passages(layers)
    least = min(passage.least_edge for passage in seen)
    radii = [passage.graph.radius for passage in seen]
    radius = max((r for r in radii if r is not None), default=1) if None not in radii else None
    step = 0.0 if radius is None else log_rate(least, max(radius, 1))
    log_values, bounds = 0.0, []
    first = seen[0]
    log_start = 0.5 * math.log(first.tokens) - math.log(2) + log(first.stream_in.column_spread)
    for number, (layer, passage) in enumerate(zip(layers, seen, strict=True), 1):
        log_values += log(sum(head.value_spectral for head in layer.heads))
        shrunk = step * (number // max(radius, 1)) if radius is not None and math.isfinite(step) else 0.0
        if radius is not None and step == -math.inf:
            shrunk = -math.inf
        bounds.append(
            LayerBound(
                layer.layer,
                log_upper=log_start + shrunk + log_values,
                log_measured=log(passage.stream_out.mu),
                hypotheses=graph_claims(passage, strong=False),
                log_factor=step / max(radius or 1, 1),
                at_floor=passage.law_at_floor or passage.stream_at_floor,
                log_rounding=number * math.log1p(passage.rounding),
            )
        )
    growth = max(sum(head.value_spectral for head in layer.heads) for layer in layers)
    hypotheses = (
        *structure(network),
        claim("attention alone (no skip, MLP or norm)", bool(network.pure)),
        Hypothesis("values of norm at most 1 (enough for bounded products)", growth, 1.0),
    )
    depth = replace(bounds[-1], layer=None, hypotheses=())
    said = (
        f"The smallest attention on an edge is {powers_of_ten(log(least))} and the radius "
        f"{'undefined' if radius is None else radius}: the rate is one minus "
        f"{powers_of_ten((radius or 1) * log(least))} per {radius or 1} layer{'s' if (radius or 1) > 1 else ''}."
    )
    return Evaluation("wu_2024_masks", "mu of the stream", tuple(bounds), depth, hypotheses, said)
