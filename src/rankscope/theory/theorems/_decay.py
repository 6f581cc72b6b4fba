"""What the theorems on masks share: a rate per layer from the graph, and who may use it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rankscope.theory.theorems._evaluation import Hypothesis, claim
from rankscope.theory.theorems._quantities import LayerQuantities, Network, Passage

ORTHOGONAL = 1e-6
"""How far singular values may lie from 1 for values to be called orthogonal."""


def passages(layers: Sequence[LayerQuantities]) -> list[Passage]:
    """Every layer's passage; the theorems on masks are not evaluated without."""
    return [layer.passage for layer in layers if layer.passage is not None]


def log_rate(least_edge: float, length: int, sources: int = 1, power: int = 1) -> float:
    r""":math:`\log(1 - m\epsilon^{pr})`: the logarithm of what is left after r layers.

    Example:
        >>> round(math.exp(log_rate(0.5, 1)), 12), log_rate(0.0, 3)
        (0.5, 0.0)
    """
    if least_edge <= 0:
        return 0.0
    share = min(1.0, sources * math.exp(power * length * math.log(least_edge)))
    return math.log1p(-share) if share < 1 else -math.inf


def structure(network: Network) -> tuple[Hypothesis, ...]:
    """One head, and layers without skip and MLP."""
    return (Hypothesis("one head", network.heads, 1),)


def orthogonality(layers: Sequence[LayerQuantities]) -> Hypothesis:
    """How far the values are from an orthogonal matrix."""
    worst = max(max(abs(h.value_spectral - 1), abs(1 - h.value_least)) for layer in layers for h in layer.heads)
    return Hypothesis("orthogonal values", worst, ORTHOGONAL)


def graph_claims(seen: Passage, *, strong: bool) -> tuple[Hypothesis, ...]:
    """Self-loops, a token that reaches all (or all that reach all), and attention above zero on every edge."""
    reached = claim("strongly connected mask", seen.graph.strongly_connected)
    if not strong:
        reached = claim("a token that reaches every other", seen.graph.radius is not None)
    positive = Hypothesis("attention above zero on every edge", seen.least_edge, 5e-324, "at least")
    return claim("every token sees itself", seen.graph.self_loops), reached, positive
