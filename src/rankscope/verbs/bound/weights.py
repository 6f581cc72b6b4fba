"""A network's numbers from its weights alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rankscope.models.heads import HeadWeights, head_weights
from rankscope.models.lazy_blocks import LazyModel
from rankscope.theory.theorems import LayerQuantities, Network
from rankscope.verbs.bound.found import Measured
from rankscope.verbs.bound.quantities import head_sizes, mlp_size


def layer_weights(layer: int, weights: HeadWeights, block: torch.nn.Module, config: Any) -> LayerQuantities:
    """The norms of one layer's weights."""
    mlp, note = mlp_size(block, config)
    return LayerQuantities(layer, head_sizes(weights), weights.scale, mlp, note)


def read_weights(model: LazyModel) -> Measured:
    """The norms of every layer, one block in memory at a time."""
    layers: list[LayerQuantities] = []
    qk_norm, width = False, 0
    for block in model.blocks():
        weights = head_weights(block.module, model.config)
        known = layer_weights(block.layers[0], weights, block.module, model.config)
        layers += [replace(known, layer=layer) for layer in block.layers]
        qk_norm, width = qk_norm or weights.qk_norm, weights.W_Q.shape[1]
    network = Network(
        depth=len(layers),
        heads=max(len(layer.heads) for layer in layers),
        width=width,
        bilinear=model.family.position == "none" and not qk_norm,
    )
    return Measured(None, 0, network, tuple(layers))
