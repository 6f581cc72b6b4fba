r"""The step both LayerNorm theorems repeat: on the unit sphere the least cosine rises.

With tokens of unit length, orthogonal values and cosines at least 0, r layers give
:math:`1 - \phi' \le (1 - m\epsilon^{2r})(1 - \phi)` for the least cosine :math:`\phi` and m tokens that reach all
within r layers, since scaling back to unit length only raises a cosine that is not negative. And
:math:`\mu^2 = \frac1N\sum_{ij}(1 - \cos_{ij}) \le (N-1)(1 - \phi)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rankscope.theory.theorems._decay import graph_claims, log_rate, orthogonality, passages, structure
from rankscope.theory.theorems._evaluation import Evaluation, Hypothesis, LayerBound, claim, log, powers_of_ten
from rankscope.theory.theorems._quantities import LayerQuantities, Network, Passage

NONNEGATIVE = -1e-15


def sphere_decay(
    name: str,
    network: Network,
    layers: Sequence[LayerQuantities],
    length_of: Callable[[Passage], int | None],
    sources_of: Callable[[Passage], int],
    further: tuple[Hypothesis, ...],
    *,
    strong: bool,
) -> Evaluation:
    """Bounds on mu of the tokens scaled to unit length, from the first layer at which no cosine is negative."""
    seen = passages(layers)
    least = min(passage.least_edge for passage in seen)
    lengths = [length_of(passage) for passage in seen]
    length = None if None in lengths else max(max((x for x in lengths if x is not None), default=1), 1)
    sources = min(sources_of(passage) for passage in seen)
    step = 0.0 if length is None else log_rate(least, length, sources, power=2)
    bounds, since, log_start = [], None, 0.0
    for number, (layer, passage) in enumerate(zip(layers, seen, strict=True)):
        if since is None and passage.stream_in.least_cosine >= NONNEGATIVE:
            since = number
            apart = max(0.0, 1 - passage.stream_in.least_cosine)
            log_start = 0.5 * log((passage.tokens - 1) * apart)
        log_upper = 0.5 * math.log(passage.tokens)
        if since is not None and length is not None:
            turns = (number + 1 - since) // length
            log_upper = min(log_upper, log_start + (0.5 * step * turns if turns else 0.0))
        bounds.append(
            LayerBound(
                layer.layer,
                log_upper=log_upper,
                log_measured=log(passage.stream_out.unit_mu),
                hypotheses=graph_claims(passage, strong=strong),
                log_factor=0.5 * step / (length or 1),
                at_floor=passage.law_at_floor or passage.stream_at_floor,
                log_rounding=(number + 1) * math.log1p(passage.rounding),
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
    lost = powers_of_ten(log(sources) + 2 * (length or 1) * log(least))
    said = (
        f"Smallest attention on an edge {powers_of_ten(log(least))}; cosines are not negative from {begun} on; the "
        f"rate is one minus {lost} per {2 * (length or 1)} layers."
    )
    return Evaluation(name, "mu of the tokens scaled to unit length", tuple(bounds), depth, hypotheses, said)
