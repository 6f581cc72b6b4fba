r"""The step shared by both collapse theorems: :math:`\|res(SA(X))\| \le (4\gamma\beta H s)\|res(X)\|^3`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rankscope.ext.theory.theorems._quantities import LayerQuantities, Network, Passage
from rankscope.ext.theory.theorems._spec import Hypothesis, LayerBound, claim, log, powers_of_ten, rows_add_up

LARGEST_SPREAD = 1.2564312086261697
"""The positive root of e^x = 1 + 2x: up to here the exponentials of the proof stay below their chords."""


def cubic_layer(network: Network, layer: LayerQuantities, heads: int, log_more: float = 0.0) -> LayerBound:
    """One layer: the bound from its input residual, and the measured output residual.

    ``log_more`` is the logarithm of an additional factor on the bound.
    """
    seen = layer.passage
    gamma = least_gamma(seen)
    log_factor = math.log(4 * heads * layer.scale) + log(layer.beta) + log_more + log(gamma)
    return LayerBound(
        layer.layer,
        log_upper=log_factor + 3 * log(seen.composite_in),
        log_measured=log(seen.composite_out),
        hypotheses=(
            Hypothesis("scores spread by at most 1.256 along a row", max(seen.spread), LARGEST_SPREAD),
            Hypothesis("heads together stay below H times the largest", _sum_over_heads(layer, gamma, heads), 1.0),
            claim("every row sees every token", seen.graph.complete),
            *bilinear_attention(seen),
        ),
        log_factor=log_factor,
        at_floor=seen.at_floor,
        log_rounding=seen.log_rounding,
    )


def least_gamma(seen: Passage) -> float:
    r"""Smallest :math:`\gamma` for which the proof works in every head; 0 if all scores are equal."""
    gammas = [
        math.sqrt(total * most) / (2 * one)
        for total, most, one in zip(seen.spread_total, seen.spread, seen.score_one, strict=True)
        if one > 0
    ]
    return max(gammas, default=0.0)


def _sum_over_heads(layer: LayerQuantities, gamma: float, heads: int) -> float:
    r"""Bound on the composite norm of the sum over heads, divided by H times the largest, which the theorem uses.

    The composite norm has no triangle inequality, but its two norms do: the sum is at most
    :math:`2\sqrt{\sum_h(\sum_iD_{ii})\|W_h\|_1\cdot\sum_h(\max_iD_{ii})\|W_h\|_\infty}\,\|R\|_{1,\infty}`.
    """
    seen = layer.passage
    ones = sum(total * head.value_one for total, head in zip(seen.spread_total, layer.heads, strict=True))
    infs = sum(most * head.value_inf for most, head in zip(seen.spread, layer.heads, strict=True))
    allowed = 2 * gamma * layer.scale * layer.beta * heads * seen.composite_in**2
    return math.sqrt(ones * infs) / allowed if allowed > 0 else float(ones * infs > 0)


def bilinear_attention(seen: Passage) -> tuple[Hypothesis, ...]:
    """Whether attention is what its weights say, tested on attention itself: no sink, cap, bias or temperature."""
    return (
        rows_add_up(seen),
        Hypothesis("attention is the softmax of query times key", seen.score_gap, seen.score_rounding),
    )


def network_hypotheses(network: Network) -> tuple[Hypothesis, ...]:
    """Hypotheses of all versions: nothing but attention, and scores that are bilinear in the tokens."""
    return (
        claim("scores without positions or norms", network.bilinear),
        claim("attention alone (no skip, MLP or norm)", network.pure),
    )


def cubic_depth(bounds: Sequence[LayerBound], layers: Sequence[LayerQuantities]) -> LayerBound:
    r"""All layers: :math:`\log r_L \le \sum_l 3^{L-l}c_l + 3^L\log r_0`, from the first residual on."""
    log_bound = log(layers[0].passage.composite_in)
    for bound in bounds:
        assert bound.log_factor is not None
        log_bound = bound.log_factor + 3 * log_bound
    last = layers[-1].passage
    return LayerBound(
        None,
        log_upper=log_bound,
        log_measured=log(last.composite_out),
        at_floor=last.at_floor,
        log_rounding=sum_of_rounding(layers),
    )


def sum_of_rounding(layers: Sequence[LayerQuantities]) -> float:
    """Rounding over the whole depth: every layer contributes, and each later layer cubes it."""
    return sum(3.0 ** min(len(layers) - 1 - n, 600) * x.passage.log_rounding for n, x in enumerate(layers))


def cubic_sentence(bounds: Sequence[LayerBound], layers: Sequence[LayerQuantities]) -> str:
    """A sentence: in how many layers the bound shows that the residual shrinks, and in how many it does."""
    seen = [(bound, layer.passage) for bound, layer in zip(bounds, layers, strict=True)]
    shows = sum(b.log_upper is not None and b.log_upper < log(p.composite_in) for b, p in seen)
    shrinks = sum(p.composite_out < p.composite_in for _, p in seen)
    needs = [b.log_factor + 2 * log(p.composite_in) for b, p in seen if b.log_factor is not None]
    met = sum(b.holds for b, _ in seen)
    return (
        f"The bound shows that the residual shrinks in {shows} of {len(seen)} layers, where it does in {shrinks}: the "
        f"factor that has to be below 1 is between {powers_of_ten(min(needs))} and {powers_of_ten(max(needs))}. The "
        f"hypotheses on a layer are met in {met}."
    )
