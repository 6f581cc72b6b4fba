r"""The step both LayerNorm theorems repeat: on the unit sphere the least cosine rises.

With tokens of unit length, orthogonal values and cosines at least 0, a window of r layers gives
:math:`1 - \phi' \le (1 - m\epsilon^{2r})(1 - \phi)` for the least cosine :math:`\phi` and m tokens that reach all
within it, since scaling back to unit length only raises a cosine that is not negative. And
:math:`\mu^2 = \frac1N\sum_{ij}(1 - \cos_{ij}) \le (N-1)(1 - \phi)`. Values that are orthogonal only to rounding, with
singular values from a to b, stretch an angle by at most b/a: that factor is in the bound, squared, because a cosine of
zero may fall below zero by as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rankscope.theory.theorems._decay import (
    graph_claims,
    mean_rate,
    orthogonality,
    passages,
    slowest,
    structure,
    window_rates,
    windows,
)
from rankscope.theory.theorems._evaluation import Evaluation, Hypothesis, LayerBound, claim, log, powers_of_ten
from rankscope.theory.theorems._layers import on_the_sphere, rows_add_up
from rankscope.theory.theorems._quantities import LayerQuantities, Network

NONNEGATIVE = -1e-15


def sphere_decay(
    name: str,
    network: Network,
    layers: Sequence[LayerQuantities],
    further: tuple[Hypothesis, ...],
    *,
    strong: bool,
) -> Evaluation:
    """Bounds on mu of the tokens scaled to unit length, from the first layer at which no cosine is negative."""
    seen = passages(layers)
    least = min(passage.least_edge for passage in seen)
    since = next((n for n, p in enumerate(seen) if p.stream_in.least_cosine >= NONNEGATIVE), None)
    cut = [] if since is None else windows(seen, since, all_sources=strong)
    rates = window_rates(cut, least, power=2)
    bounds, log_bound, log_rounding = [], 0.0, 0.0
    for number, (layer, passage) in enumerate(zip(layers, seen, strict=True)):
        log_upper = 0.5 * math.log(passage.tokens)
        log_rounding += passage.log_rounding
        if number == since:
            # 1 - phi is half the squared distance, which keeps its digits where cosines are one to rounding
            log_bound = 0.5 * math.log((passage.tokens - 1) / 2) + log(passage.stream_in.farthest)
        if since is not None and number >= since:
            log_bound += 0.5 * rates.get(number, 0.0) + 2 * log_stretch(layer)
            log_upper = min(log_upper, log_bound)
        bounds.append(
            LayerBound(
                layer.layer,
                log_upper=log_upper,
                log_measured=log(passage.stream_out.unit_mu),
                hypotheses=(
                    *graph_claims(passage, strong=strong),
                    rows_add_up(passage),
                    *on_the_sphere(passage),
                ),
                log_factor=0.5 * mean_rate(cut, rates),
                at_floor=passage.at_floor or passage.stream_at_floor,
                log_rounding=log_rounding,
            )
        )
    hypotheses = (
        *structure(network),
        claim("attention and scaling to unit length only", bool(network.row_scaling)),
        orthogonality(layers),
        *further,
    )
    depth = replace(bounds[-1], layer=None, hypotheses=())
    begun = "no layer" if since is None else f"layer {since}"
    said = (
        f"Smallest attention on an edge {powers_of_ten(log(least))}; cosines are not negative from {begun} on; "
        f"{slowest(cut, least, power=2)}."
    )
    quantity = "mu of the tokens scaled to unit length"
    return Evaluation(name, quantity, tuple(bounds), depth, hypotheses, said, cumulative=True)


def log_stretch(layer: LayerQuantities) -> float:
    """Logarithm of the largest over the least singular value of the values; 0 where they are not orthogonal at all."""
    head = layer.heads[0]
    return log(head.value_spectral / head.value_least) if head.value_least > 0.5 else 0.0
