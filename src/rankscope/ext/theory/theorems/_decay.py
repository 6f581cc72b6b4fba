r"""Shared by the theorems on masks: a rate per layer from the graph, and its hypotheses.

Both LayerNorm theorems share one more step: on the unit sphere, the smallest cosine increases.
With tokens of unit length, orthogonal values and cosines at least 0, a window of r layers gives
:math:`1 - \phi' \le (1 - m\epsilon^{2r})(1 - \phi)` for the least cosine :math:`\phi` and m tokens that reach all
within it, because scaling back to unit length can only increase a cosine that is not negative. And
:math:`\mu^2 = \frac1N\sum_{ij}(1 - \cos_{ij}) \le (N-1)(1 - \phi)`. Values that are orthogonal only to rounding, with
singular values from a to b, change an angle by at most b/a: that factor is in the bound, squared, because a cosine of
zero may fall below zero by that much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankscope.ext.theory.theorems._quantities import LayerQuantities, Network, Passage
from rankscope.ext.theory.theorems._spec import (
    Evaluation,
    Hypothesis,
    LayerBound,
    claim,
    log,
    on_the_sphere,
    powers_of_ten,
    rows_add_up,
)

ORTHOGONAL = 1e-6
"""How far singular values may be from 1 for the values to count as orthogonal."""


def log_rate(least_edge: float, length: int, sources: int = 1, power: int = 1) -> float:
    r""":math:`\log(1 - m\epsilon^{pr})`: the logarithm of the factor for r layers.

    Example:
        >>> round(math.exp(log_rate(0.5, 1)), 12), log_rate(0.0, 3)
        (0.5, 0.0)
    """
    if least_edge <= 0:
        return 0.0
    share = min(1.0, sources * math.exp(power * length * math.log(least_edge)))
    return math.log1p(-share) if share < 1 else -math.inf


@dataclass(frozen=True)
class Window:
    """Consecutive layers within which information from some tokens reaches every token.

    Attributes:
        last: position of the last of them among the given layers.
        length: number of layers.
        sources: number of tokens that reach all.
    """

    last: int
    length: int
    sources: int


def windows(seen: Sequence[Passage], first: int = 0, *, all_sources: bool = False) -> list[Window]:
    """Divide the layers from ``first`` on into windows, each as short as possible; a remainder at the end is dropped.

    The graphs are multiplied in the order of the layers. Under one mask for all of them each window is as long as the
    radius of its graph (the diameter with ``all_sources``); if masks change, the radii of the individual graphs
    say nothing about a window.

    Args:
        seen: the layers.
        first: the first layer.
        all_sources: end a window when every token has reached all, and not when one has.
    """
    windows_so_far: list[Window] = []
    reach, length = None, 0
    for position in range(first, len(seen)):
        edges = seen[position].graph.edges()
        # float32 represents counts of up to 2^24 tokens exactly, and uses BLAS
        reach = edges if reach is None else (edges.astype(np.float32) @ reach.astype(np.float32)) > 0
        length += 1
        sources = int(reach.all(0).sum())
        if sources == seen[position].tokens or (sources and not all_sources):
            windows_so_far.append(Window(position, length, sources))
            reach, length = None, 0
    return windows_so_far


def window_rates(cut: Sequence[Window], least_edge: float, *, power: int = 1) -> dict[int, float]:
    """The log-factor of each window, at its last layer: see :func:`log_rate`."""
    counted = [(w, w.sources if power == 2 else 1) for w in cut]
    return {w.last: log_rate(least_edge, w.length, sources, power) for w, sources in counted}


def mean_rate(cut: Sequence[Window], rates: Mapping[int, float]) -> float:
    """The mean log-factor per layer, over the windows; 0 without any."""
    return sum(rates.values()) / sum(w.length for w in cut) if cut else 0.0


def slowest(cut: Sequence[Window], least_edge: float, *, power: int = 1) -> str:
    """The longest window and its rate, for a sentence."""
    if not cut:
        return "no token reaches every other in these layers, and there is no rate"
    longest = max(cut, key=lambda w: (w.length, -w.sources))
    sources = longest.sources if power == 2 else 1
    lost = powers_of_ten(log(sources) + power * longest.length * log(least_edge))
    layers = power * longest.length
    changing = "" if len({w.length for w in cut}) == 1 else ", and more where a token reaches every other sooner"
    return f"the rate is one minus {lost} per {layers} layer{'s' if layers > 1 else ''}{changing}"


def structure(network: Network) -> tuple[Hypothesis, ...]:
    """Hypotheses: one head, and layers without skip and MLP."""
    return (Hypothesis("one head", network.heads, 1),)


def orthogonality(layers: Sequence[LayerQuantities]) -> Hypothesis:
    """How far the values are from an orthogonal matrix."""
    worst = max(max(abs(h.value_spectral - 1), abs(1 - h.value_least)) for layer in layers for h in layer.heads)
    return Hypothesis("orthogonal values", worst, ORTHOGONAL)


def graph_claims(seen: Passage, *, strong: bool) -> tuple[Hypothesis, ...]:
    """Hypotheses: self-loops, a token (or all tokens) that reaches all, and positive attention on every edge."""
    reached = claim("strongly connected mask", seen.graph.strongly_connected)
    if not strong:
        reached = claim("a token that reaches every other", seen.graph.has_centre)
    positive = Hypothesis("attention above zero on every edge", seen.least_edge, 5e-324, "at least")
    return claim("every token sees itself", seen.graph.self_loops), reached, positive


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
    seen = [layer.passage for layer in layers]
    least = min(passage.least_edge for passage in seen)
    since = next((n for n, p in enumerate(seen) if p.stream_in.least_cosine >= NONNEGATIVE), None)
    cut = [] if since is None else windows(seen, since, all_sources=strong)
    rates = window_rates(cut, least, power=2)
    bounds, log_bound, log_rounding = [], 0.0, 0.0
    for number, (layer, passage) in enumerate(zip(layers, seen, strict=True)):
        log_upper = 0.5 * math.log(passage.tokens)
        log_rounding += passage.log_rounding
        if number == since:
            # 1 - phi is half the squared distance, which keeps its digits if cosines are one up to rounding
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
        claim("attention and scaling to unit length only", network.row_scaling),
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
    """Logarithm of the ratio of the largest to the smallest singular value; 0 if the values are far from orthogonal."""
    head = layer.heads[0]
    return log(head.value_spectral / head.value_least) if head.value_least > 0.5 else 0.0
