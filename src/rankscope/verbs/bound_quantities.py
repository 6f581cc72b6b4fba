"""Sizes that theorems ask for: of heads, of MLPs, of the stream, and of the skip around attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rankscope._errors import InputError, UnsupportedConfigError
from rankscope.models.heads import HeadWeights
from rankscope.models.mlp_weights import mlp_weights
from rankscope.paths.maps import Chain, Gain
from rankscope.paths.network import FrozenStep
from rankscope.theory.lipschitz import LipschitzConstants, gated_constants, mlp_constants
from rankscope.theory.operator_norms import composite_residual, inf_norm, one_norm, product_norm
from rankscope.theory.scaled import centred
from rankscope.theory.theorems import HeadSizes, StreamState


def head_sizes(weights: HeadWeights) -> tuple[HeadSizes, ...]:
    """Norms of each head's products, one head after the other."""
    found = []
    for head in range(weights.heads):
        group = int(weights.kv_of_head[head])
        W_Q, W_K, W_V, W_O = (
            part.detach().to(torch.float64)
            for part in (weights.W_Q[head], weights.W_K_groups[group], weights.W_V_groups[group], weights.W_O[head])
        )
        value = W_V @ W_O
        square = W_V.shape[0] == W_V.shape[1] == W_O.shape[1]
        found.append(
            HeadSizes(
                score_one=float(one_norm(W_Q @ W_K.T)),
                score_spectral=float(product_norm(W_Q[None], W_K[None])),
                value_one=float(one_norm(value)),
                value_inf=float(inf_norm(value)),
                value_spectral=float(product_norm(W_V[None], W_O.T[None])),
                value_least=float(torch.linalg.svdvals(value)[-1]) if square else 0.0,
            )
        )
    return tuple(found)


def mlp_size(block: nn.Module, config: Any) -> tuple[LipschitzConstants | None, str]:
    """Certified constants of the block's MLP, or why there are none."""
    try:
        read = mlp_weights(block, config)
        if read.W_gate is None:
            return mlp_constants(read.W_in, read.W_out, read.activation), ""
        assert read.radius is not None
        return gated_constants(read.W_gate, read.W_in, read.W_out, read.activation, read.radius), ""
    except (UnsupportedConfigError, InputError) as error:
        return None, str(error)


def stream_state(X: Tensor) -> StreamState:
    """What theorems on masks ask of the stream, (tokens, dim)."""
    X = X.to(torch.float64)
    lengths = torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    unit = X / torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    return StreamState(
        norm=float(torch.linalg.vector_norm(X)),
        mu=float(torch.linalg.vector_norm(centred(X))),
        composite=float(composite_residual(X)),
        unit_mu=float(torch.linalg.vector_norm(centred(unit))),
        column_spread=float(torch.linalg.vector_norm(X.amax(0) - X.amin(0))),
        least_cosine=float((unit @ unit.T).min()),
        rank=int(torch.linalg.matrix_rank(X)),
        farthest=_farthest(unit),
    )


def _farthest(X: Tensor) -> float:
    """Largest distance between two tokens; centred first, so that it keeps its digits where tokens are close."""
    R = centred(X)
    gram = R @ R.T
    own = gram.diagonal()
    return float((own[:, None] + own - 2 * gram).max().clamp_min(0.0).sqrt())


def skip_gain_of(step: FrozenStep) -> float | None:
    """The gain of the skip where stream plus branch is a linear map of the residual alone; None elsewhere."""
    if step.skip is None or not step.before.is_identity or not step.after.is_identity or step.source is not None:
        return None
    return _plain_gain(step.skip)


def _plain_gain(chain: Chain) -> float | None:
    total = 1.0
    for part in chain.parts:
        if not isinstance(part, Gain) or not isinstance(part.factor, float):
            return None
        total *= part.factor
    return total
