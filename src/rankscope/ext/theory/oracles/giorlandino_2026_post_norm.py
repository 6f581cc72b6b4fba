r"""Cosine of two tokens through post-norm blocks with a ReLU MLP, in the limit of many tokens and large width.

Scores have standard deviation :math:`\beta\sqrt{\log T}`. Below :math:`\beta_c = \sqrt{2/(1-\rho)}` attention averages
over all tokens; above it a few tokens dominate (a random energy model), and outputs keep their norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rankscope._citations import Cite
from rankscope.ext.theory.oracles._spec import (
    COMPLETE,
    ORACLES,
    POSITION_FREE,
    Assumption,
    Oracle,
    share_of,
    squared_residual,
)
from rankscope.models.design import Design


@dataclass(frozen=True)
class PostNormBlock:
    """Variances of a post-norm block: values, biases, both MLP matrices, strengths of the skips.

    ``weight`` and ``out_weight`` are the variances of the MLP's matrices times their inputs; in the paper they are one.
    """

    value: float
    weight: float
    out_weight: float
    bias: float = 0.0
    attention_skip: float = 1.0
    mlp_skip: float = 1.0


def critical_beta(cosine: float) -> float:
    r"""The inverse temperature :math:`\sqrt{2/(1-\rho)}` at which attention freezes; inf at collapse."""
    return math.sqrt(2 / (1 - cosine)) if cosine < 1 else math.inf


def next_cosine(cosine: float, beta: float, block: PostNormBlock) -> float:
    r"""Cosine after one block. **Exact** in the limit of many tokens and large width; NaN if the stream vanishes.

    Example:
        >>> block = PostNormBlock(value=0.2, weight=0.2, out_weight=0.2, bias=4e-4)
        >>> rho = 0.2
        >>> for _ in range(5):
        ...     rho = next_cosine(rho, 0.5, block)
        >>> round(rho, 4)
        0.4067
    """
    beta_c = critical_beta(cosine)
    kept = cosine if beta <= beta_c else cosine + (1 - cosine) * (1 - beta_c / beta)
    skip, mlp_skip = block.attention_skip**2, block.mlp_skip**2
    after = share_of(block.value * cosine + block.bias + skip * cosine, block.value * kept + block.bias + skip)
    if block.value > 0 and kept + block.bias + skip == 0:
        after = 1.0  # attention averages tokens without a common part: the limit of a small one, the same for all
    q1, p1 = block.weight + block.bias, block.weight * after + block.bias
    q2 = block.out_weight * q1 / 2 + block.bias
    p2 = block.out_weight * q1 / 2 * relu_cosine(share_of(p1, q1)) + block.bias
    return share_of(p2 + mlp_skip * after, q2 + mlp_skip)


def relu_cosine(cosine: float) -> float:
    r"""Normalised arc-cosine kernel :math:`(\sqrt{1-c^2} + c(\pi - \arccos c))/\pi` of a ReLU layer. **Exact**."""
    c = min(cosine, 1.0)  # in this order NaN stays NaN
    return (math.sqrt(1 - c * c) + c * (math.pi - math.acos(c))) / math.pi


def _is_post(design: Design, tokens: int) -> tuple[bool, str]:
    return design.norm_place == "post", design.norm_place


def _is_relu(design: Design, tokens: int) -> tuple[bool, str]:
    return design.mlp == "relu", design.mlp


def _has_many(design: Design, tokens: int) -> tuple[bool, int]:
    return tokens >= 64, tokens


def _curve(design: Design, tokens: int, blocks: int) -> Sequence[float]:
    block = PostNormBlock(
        value=design.value_gain * design.attention_scale**2,
        weight=design.mlp_in_std**2 * design.width,
        out_weight=design.mlp_out_std**2 * design.mlp_width * design.mlp_scale**2,
        attention_skip=design.attention_skip,
        mlp_skip=design.mlp_skip,
    )
    beta = design.score_std / math.sqrt(math.log(tokens))
    cosines = [design.initial_cosine]
    for _ in range(blocks):
        cosines.append(next_cosine(cosines[-1], beta, block))
    return [squared_residual(cosine, tokens) for cosine in cosines]


ORACLES.add(
    "giorlandino_2026_post_norm",
    Oracle(
        name="giorlandino_2026_post_norm",
        summary="Post-norm blocks with ReLU MLPs, many tokens, large width",
        assumptions=(
            COMPLETE,
            POSITION_FREE,
            Assumption("norm after each sum", _is_post),
            Assumption("ReLU MLP", _is_relu),
            Assumption("at least 64 tokens", _has_many),
        ),
        cites=(Cite("giorlandino2026"),),
        curve=_curve,
    ),
)
