"""Small attention networks in plain float64, run layer by layer and read as theorems want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.ext.theory.bound.reading import SeenLayer, head_sizes, passage_of
from rankscope.ext.theory.lipschitz import LipschitzConstants
from rankscope.ext.theory.theorems import Evaluation, LayerQuantities, Network
from rankscope.models.heads import HeadWeights


@dataclass(frozen=True)
class Simulated:
    network: Network
    layers: tuple[LayerQuantities, ...]
    stream: tuple[Tensor, ...]


def rand(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def pick(generator: torch.Generator, low: int, high: int) -> int:
    """A whole number from low to high."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def heads_of(W_Q: Tensor, W_K: Tensor, W_V: Tensor, W_O: Tensor, scale: float | None = None) -> HeadWeights:
    heads, dim, width = W_Q.shape
    return HeadWeights(
        W_Q=W_Q,
        W_K_groups=W_K,
        W_V_groups=W_V,
        W_O=W_O,
        b_Q=W_Q.new_zeros(heads, width),
        b_K_groups=W_K.new_zeros(heads, width),
        b_V_groups=W_V.new_zeros(heads, W_V.shape[2]),
        b_O=W_O.new_zeros(dim),
        kv_of_head=torch.arange(heads),
        scale=width**-0.5 if scale is None else scale,
        rotary=False,
        qk_norm=False,
    )


def random_heads(generator: torch.Generator, dim: int, heads: int, d_qk: int, d_v: int) -> HeadWeights:
    return heads_of(
        rand(generator, heads, dim, d_qk),
        rand(generator, heads, dim, d_qk),
        rand(generator, heads, dim, d_v),
        rand(generator, heads, d_v, dim),
    )


def one_head(W_QK: Tensor, W: Tensor, scale: float | None = None) -> HeadWeights:
    """One head with these products."""
    eye = torch.eye(W.shape[0], dtype=torch.float64)
    return heads_of(W_QK[None], eye[None], W[None], eye[None], scale)


def attention(weights: HeadWeights, X: Tensor, mask: Tensor | None) -> Tensor:
    scores = weights.scale * (X @ weights.W_Q) @ (X @ weights.W_K).mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1)


def simulate(
    weights: Sequence[HeadWeights],
    X: Tensor,
    *,
    mask: Tensor | Sequence[Tensor | None] | None = None,
    skip: float = 0.0,
    unit: bool = False,
    mlp: Callable[[Tensor], Tensor] | None = None,
    constants: LipschitzConstants | None = None,
    cubic: bool = False,
) -> Simulated:
    """Attention layers one after the other, with a skip, an MLP or scaling to unit length after each.

    ``mask`` is one for all layers, or one for each.
    """
    layers, stream = [], [X]
    masks = mask if isinstance(mask, Sequence) else [mask] * len(weights)
    for number, (heads, seen) in enumerate(zip(weights, masks, strict=True)):
        P = attention(heads, X, seen)
        given = (P @ (X @ heads.W_V + heads.b_V[:, None]) @ heads.W_O).sum(0) + heads.b_O
        summed = given + skip * X
        out = summed if mlp is None else mlp(summed)
        out = out / torch.linalg.vector_norm(out, dim=-1, keepdim=True) if unit else out
        passage = passage_of(
            heads,
            SeenLayer(X, X, given, summed, out),
            P,
            skip_gain=skip if skip else None,
            position="none",
            floor=4 * torch.finfo(torch.float64).eps,
            cubic=cubic,
        )
        layers.append(LayerQuantities(number, passage, head_sizes(heads), heads.scale, constants))
        X = out
        stream.append(X)
    network = Network(
        depth=len(layers),
        heads=weights[0].heads,
        width=X.shape[1],
        pure=not skip and mlp is None and not unit,
        only_mlp=mlp is not None and not skip and not unit,
        has_skip=bool(skip),
        row_scaling=unit and not skip and mlp is None,
    )
    return Simulated(network, tuple(layers), tuple(stream))


def violations(evaluation: Evaluation) -> list[str]:
    """Every bound that the measured value breaks."""
    bounds = [*evaluation.layers, *([evaluation.depth] if evaluation.depth is not None else [])]
    return [f"{b.layer}: {b.log_lower} {b.log_measured} {b.log_upper}" for b in bounds if b.is_violated]
