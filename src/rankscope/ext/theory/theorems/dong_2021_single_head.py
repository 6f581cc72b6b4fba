"""Collapse of attention alone, one head per layer."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.ext.theory.theorems._cubic import cubic_depth, cubic_layer, cubic_sentence, network_hypotheses
from rankscope.ext.theory.theorems._quantities import LayerQuantities, Network
from rankscope.ext.theory.theorems._spec import Evaluation, Hypothesis, theorem


@theorem(
    cites=(Cite("dong2021attention", "thm. 2.2"),),
    statement=r"\|res(SAN(X))\|_{1,\infty} \le \left(\tfrac{4\gamma\beta}{\sqrt{d_{qk}}}\right)^{(3^L-1)/2}"
    r"\|res(X)\|_{1,\infty}^{3^L}",
    hypotheses=(
        "one head",
        "attention alone",
        "bilinear scores",
        "complete mask",
        "scores spread by at most 1.256",
        "rows of attention add up to one",
    ),
    sides="upper",
)
def dong_2021_single_head(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
    r"""Attention alone with one head collapses doubly exponentially, in the composite norm.

    **Bound** on the residual after attention; per layer :math:`(4\gamma\beta/\sqrt{d_{qk}})\|res(X)\|^3` with
    :math:`\beta = \|W_{QK}\|_1\|W_V\|_{1,\infty}`, over the depth composed from the first layer's residual with each
    layer's own factor, which is sharper than a single :math:`\beta`. :math:`\gamma` is the smallest for which the
    proof works. For a layer with several heads the formula uses the largest :math:`\beta`, and the hypothesis of
    one head says that it fails.
    """
    bounds = tuple(cubic_layer(network, layer, heads=1) for layer in layers)
    one = Hypothesis("one head", network.heads, 1)
    return Evaluation(
        "dong_2021_single_head",
        "composite residual after attention",
        bounds,
        cubic_depth(bounds, layers),
        (one, *network_hypotheses(network)),
        cubic_sentence(bounds, layers),
    )
