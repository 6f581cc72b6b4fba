"""One passage through attention: the numbers that theorems are evaluated on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rankscope._errors import InputError
from rankscope.models.heads import HeadWeights
from rankscope.theory.attention_graph import attention_graph, least_edge
from rankscope.theory.attention_weights import HeadTensors
from rankscope.theory.composite_norms import composite_norm, composite_residual, score_spread
from rankscope.theory.contraction import Gains, layer_gains
from rankscope.theory.cubic_bounds import cubic_interval
from rankscope.theory.lipschitz import spectral_bound
from rankscope.theory.operator_norms import product_norm
from rankscope.theory.scaled import centred
from rankscope.theory.theorems import MOST_ROUNDING, Passage, StreamState


def passage_of(
    weights: HeadWeights,
    read: Tensor,
    P: Tensor,
    before: StreamState,
    after: StreamState,
    *,
    skip_gain: float | None,
    position: str,
    floor: float,
    steps: int | None,
    cubic: bool = True,
) -> Passage:
    """One sequence through one layer.

    Args:
        weights: of its heads, as the model holds them.
        read: (tokens, dim), what attention reads.
        P: (heads, tokens, tokens).
        before: the stream before the block.
        after: and behind it.
        skip_gain: of the skip where attention reads the stream itself, else None.
        position: how positions enter the scores.
        floor: relative residual below which there is only rounding.
        steps: of Lanczos; None leaves out the gains altogether.
        cubic: evaluate the cubic law too, where it speaks.
    """
    tensors = _tensors(weights)
    R = centred(read)
    spread = score_spread(R, tensors)
    out = centred((P @ (R @ tensors.W_V) @ tensors.W_O).sum(0))
    edge, edges = least_edge(P)
    graph = attention_graph(edges)
    cubic = cubic and graph.complete and position == "none" and not weights.qk_norm
    entropy, seen = _sharpest_rows(P)
    gains = None if steps is None else _gains(R, P, tensors, 0.0, steps)
    size, left = torch.linalg.vector_norm(R), torch.linalg.vector_norm(out)
    steady = floor * read.shape[0] ** 0.5
    carried = torch.linalg.vector_norm(torch.linalg.vector_norm(R @ tensors.W_V @ tensors.W_O, dim=(-2, -1)))
    alone = float(steady * carried / left) if float(left) > 0 else math.inf
    return Passage(
        tokens=read.shape[0],
        composite_in=float(composite_norm(R)),
        composite_out=float(composite_residual(out)),
        frobenius_in=float(size),
        frobenius_out=float(left),
        spread=tuple(spread.largest.tolist()),
        spread_total=tuple(spread.total.tolist()),
        score_one=tuple(spread.one.tolist()),
        graph=graph,
        least_edge=edge,
        least_entropy=entropy,
        entropy_tokens=seen,
        logit_size=_logit_sizes(weights, read, position),
        stream_in=before,
        stream_out=after,
        log_cubic=_cubic(R, read, tensors) if cubic else None,
        gains=gains,
        sum_gains=None
        if skip_gain is None or gains is None or steps is None
        else _gains(R, P, tensors, skip_gain, steps),
        at_floor=float(size) <= floor * float(torch.linalg.vector_norm(read)) or alone >= MOST_ROUNDING,
        rounding=alone * _through_scores(read, P, tensors),
        entropy_floor=floor * read.shape[0],
        stream_at_floor=after.mu <= 4 * steady * after.norm,
    )


def _through_scores(read: Tensor, P: Tensor, tensors: HeadTensors) -> float:
    """By how much rounding grows on its way through scores and softmax."""
    scores = tensors.scale * ((read @ tensors.W_Q + tensors.b_Q[:, None]) @ (read @ tensors.W_K).mT).abs().max()
    undecided = (P * (1 - P)).sum(-1).max()  # one-hot rows do not move when scores are rounded
    return float(1 + scores * undecided)


def _cubic(R: Tensor, read: Tensor, tensors: HeadTensors) -> tuple[float, float]:
    found = cubic_interval(R, tensors, read.mean(0))
    return float(found.log_lower_bound), float(found.log_upper_bound)


def _gains(R: Tensor, P: Tensor, tensors: HeadTensors, gain: float, steps: int) -> Gains | None:
    try:
        return layer_gains(R, P, tensors.W_V, tensors.W_O, skip_gain=gain, steps=steps)
    except InputError:  # rows that do not add up to one: a hypothesis of its own, reported as failed
        return None


def _tensors(weights: HeadWeights) -> HeadTensors:
    """Per head, in float64."""
    wide = [part.detach().to(torch.float64) for part in (weights.W_Q, weights.W_K, weights.W_V, weights.W_O)]
    return HeadTensors(
        W_Q=wide[0],
        W_K=wide[1],
        W_V=wide[2],
        W_O=wide[3],
        b_Q=weights.b_Q.detach().to(torch.float64),
        b_V=weights.b_V.detach().to(torch.float64),
        b_O=weights.b_O.detach().to(torch.float64),
        scale=weights.scale,
    )


def _sharpest_rows(P: Tensor) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Per head the least entropy of a row that sees at least two tokens, and how many that row sees."""
    entropy = -torch.special.xlogy(P, P).sum(-1)
    sees = (P > 0).any(0).sum(-1)
    if int(sees.max()) < 2:
        return (), ()
    entropy = entropy.masked_fill(sees < 2, torch.inf)
    rows = entropy.argmin(-1)
    least = entropy.gather(-1, rows[:, None]).squeeze(-1).clamp_min(0.0)
    return tuple(least.tolist()), tuple(sees[rows].tolist())


def _logit_sizes(weights: HeadWeights, read: Tensor, position: str) -> tuple[float, ...]:
    """Per head a bound on the norm of a row of scores, from weights and tokens; NaN where more enters the scores."""
    if weights.qk_norm or position not in ("none", "rotary"):
        return (math.nan,) * weights.heads
    X = torch.cat((read, read.new_ones(read.shape[0], 1)), -1)
    size = spectral_bound(X) ** 2
    found = []
    for head in range(weights.heads):
        group = int(weights.kv_of_head[head])
        W_Q = _with_bias(weights.W_Q[head], weights.b_Q[head])
        W_K = _with_bias(weights.W_K_groups[group], weights.b_K_groups[group])
        if weights.rotary:
            queries = torch.linalg.vector_norm(X @ W_Q, dim=-1).max()
            found.append(weights.scale * float(queries * torch.linalg.vector_norm(X @ W_K)))
        else:
            found.append(weights.scale * float(product_norm(W_Q[None], W_K[None])) * size)
    return tuple(found)


def _with_bias(W: Tensor, b: Tensor) -> Tensor:
    return torch.cat((W.detach().to(torch.float64), b.detach().to(torch.float64)[None]), 0)
