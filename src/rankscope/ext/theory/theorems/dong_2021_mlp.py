"""Collapse of attention with MLPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rankscope._citations import Cite
from rankscope.ext.theory.theorems._cubic import cubic_layer, network_hypotheses, sum_of_rounding
from rankscope.ext.theory.theorems._quantities import LayerQuantities, Network
from rankscope.ext.theory.theorems._spec import Evaluation, LayerBound, claim, log, powers_of_ten, theorem


@theorem(
    cites=(Cite("dong2021attention", "cor. 3.2"),),
    statement=r"\|res(X^L)\|_{1,\infty} \le \left(\tfrac{4\gamma\beta H\lambda}{\sqrt{d_{qk}}}\right)^{(3^L-1)/2}"
    r"\|res(X)\|_{1,\infty}^{3^L}",
    hypotheses=("attention and MLPs only", "MLP with a certified Lipschitz constant", "those of the collapse"),
    sides="upper",
)
def dong_2021_mlp(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
    r"""An MLP after attention multiplies the factor of collapse by its Lipschitz constant.

    **Bound** on the composite residual after attention and MLP, without skips and norms. :math:`\lambda` is certified
    from the weights: the slope of the activation times the composite norm of :math:`|W_1||W_2|`, since the composite
    residual is what it multiplies. Measured only in a network without skips and norms: elsewhere there is no such
    state.
    """
    bounds = tuple(_layer(network, layer) for layer in layers)
    constants = [layer.mlp.composite for layer in layers if layer.mlp is not None]
    depth = None
    if len(constants) == len(layers):
        log_bound = log(layers[0].passage.composite_in)
        for bound in bounds:
            assert bound.log_factor is not None
            log_bound = bound.log_factor + 3 * log_bound
        last = bounds[-1]
        depth = replace(last, layer=None, log_upper=log_bound, hypotheses=(), log_rounding=sum_of_rounding(layers))
    said = (
        f"The MLPs multiply the factor by certified constants between {powers_of_ten(log(min(constants)))} and "
        f"{powers_of_ten(log(max(constants)))}."
        if constants
        else f"No MLP could be read: {next((layer.mlp_note for layer in layers if layer.mlp_note), 'none was found')}."
    )
    hypotheses = (
        *(h for h in network_hypotheses(network) if "alone" not in h.name),
        claim("attention and MLPs only (no skip or norm)", network.only_mlp),
    )
    return Evaluation("dong_2021_mlp", "composite residual after attention and MLP", bounds, depth, hypotheses, said)


def _layer(network: Network, layer: LayerQuantities) -> LayerBound:
    # without norms, nothing bounds the tokens by the radius of a gated MLP
    certified = layer.mlp is not None and (layer.mlp.radius is None or not network.only_mlp)
    known = claim("MLP with a certified Lipschitz constant", certified)
    if layer.mlp is None:
        return LayerBound(layer.layer, hypotheses=(known,))
    bound = cubic_layer(network, layer, len(layer.heads), log(layer.mlp.composite))
    bound = replace(bound, hypotheses=(*bound.hypotheses, known))
    if not network.only_mlp:
        return replace(bound, log_measured=None)
    after = layer.passage
    at_floor = after.at_floor or after.stream_at_floor
    return replace(bound, log_measured=log(after.stream_out.composite), at_floor=at_floor)
