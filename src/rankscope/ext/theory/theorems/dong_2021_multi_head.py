"""Collapse of attention alone, several heads per layer."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.ext.theory.theorems._cubic import cubic_depth, cubic_layer, cubic_sentence, network_hypotheses
from rankscope.ext.theory.theorems._quantities import LayerQuantities, Network
from rankscope.ext.theory.theorems._spec import Evaluation, theorem


@theorem(
    cites=(Cite("dong2021attention", "cor. 2.3"),),
    statement=r"\|res(SAN(X))\|_{1,\infty} \le \left(\tfrac{4\gamma\beta H}{\sqrt{d_{qk}}}\right)^{(3^L-1)/2}"
    r"\|res(X)\|_{1,\infty}^{3^L}",
    hypotheses=(
        "attention alone",
        "bilinear scores",
        "complete mask",
        "scores spread by at most 1.256",
        "rows of attention add up to one",
        "heads together stay below H times the largest",
    ),
    sides="upper",
)
def dong_2021_multi_head(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
    r"""Attention alone with H heads collapses doubly exponentially, in the composite norm.

    **Bound** as for one head, times H, with :math:`\beta = \max_h\|W_{QK,h}\|_1\|W_h\|_{1,\infty}`. The composite has
    no triangle inequality, so "H times the largest head" is a separate hypothesis here: it is tested with the
    two norms separately, and fails if one head is large in the 1-norm and another in the inf-norm.
    """
    bounds = tuple(cubic_layer(network, layer, heads=len(layer.heads)) for layer in layers)
    return Evaluation(
        "dong_2021_multi_head",
        "composite residual after attention",
        bounds,
        cubic_depth(bounds, layers),
        network_hypotheses(network),
        cubic_sentence(bounds, layers),
    )
