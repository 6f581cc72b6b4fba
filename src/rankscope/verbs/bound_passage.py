"""One passage through attention: the numbers that theorems are evaluated on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.models.heads import HeadWeights
from rankscope.theory.attention_graph import attention_graph, least_edge
from rankscope.theory.attention_weights import HeadTensors
from rankscope.theory.contraction import LayerGains, layer_gains
from rankscope.theory.cubic_law import cubic_interval
from rankscope.theory.lipschitz import spectral_bound
from rankscope.theory.operator_norms import composite_norm, product_norm, score_spread
from rankscope.theory.scaled import centred
from rankscope.theory.theorems import MOST_ROUNDING, Passage
from rankscope.verbs.bound_quantities import stream_state


@dataclass(frozen=True, eq=False)
class SeenLayer:
    """One sequence in one layer as the model computed it, (tokens, dim) in float64 each; padding is left out.

    Attributes:
        entry: the stream before the block.
        read: what attention read.
        given: what attention gave; None where that was not seen.
        summed: stream plus attention.
        out: the stream after the block.
        beside: norm of what was added along with attention and taken off again (a parallel MLP).
    """

    entry: Tensor
    read: Tensor
    given: Tensor | None
    summed: Tensor | None
    out: Tensor
    beside: float = 0.0


def passage_of(
    weights: HeadWeights,
    seen: SeenLayer,
    P: Tensor,
    *,
    skip_gain: float | None,
    position: str,
    floor: float,
    steps: int | None,
    cubic: bool = True,
    outside: float = 0.0,
) -> Passage:
    """One sequence through one layer.

    Args:
        weights: of its heads, as the model holds them.
        seen: what the model computed.
        P: (heads, tokens, tokens).
        skip_gain: of the skip where attention reads the stream itself, else None.
        position: how positions enter the scores.
        floor: relative residual below which there is only rounding.
        steps: of Lanczos; None leaves out the gains altogether.
        cubic: evaluate the cubic law too, where it speaks.
        outside: the largest share of a row that goes to tokens that do not count.
    """
    tensors = _tensors(weights)
    read, R = seen.read, centred(seen.read)
    spread = score_spread(R, tensors)
    edge, edges = least_edge(P)
    graph = attention_graph(edges)
    cubic = cubic and graph.complete and position == "none" and not weights.qk_norm
    entropy, counts, logits = _sharpest_rows(P)
    shared = (read.mean(0) @ tensors.W_V) + tensors.b_V
    gains = None if steps is None else _gains(R, P, tensors, shared, 0.0, steps)
    left = None if seen.given is None else centred(seen.given)
    size = float(torch.linalg.vector_norm(R))
    scores = _scores(weights, read)
    error = math.hypot(_forward_error(read, P, tensors, scores.largest), seen.beside) * floor
    rounding = math.nan if left is None else _relative(error, left)
    sum_gains, sum_out, sum_rounding = None, math.nan, math.nan
    if skip_gain is not None and steps is not None and seen.summed is not None:
        kept = centred(seen.summed)
        sum_gains = _gains(R, P, tensors, shared, skip_gain, steps)
        sum_out = float(torch.linalg.vector_norm(kept))
        sum_rounding = _relative(error + floor * float(torch.linalg.vector_norm(seen.summed)), kept)
    before, after = stream_state(seen.entry), stream_state(seen.out)
    steady = floor * read.shape[0] ** 0.5
    return Passage(
        tokens=read.shape[0],
        composite_in=float(composite_norm(R)),
        composite_out=math.nan if left is None else float(composite_norm(left)),
        frobenius_in=size,
        frobenius_out=math.nan if left is None else float(torch.linalg.vector_norm(left)),
        spread=tuple(spread.largest.tolist()),
        spread_total=tuple(spread.total.tolist()),
        score_one=tuple(spread.one.tolist()),
        graph=graph,
        least_edge=edge,
        least_entropy=entropy,
        entropy_tokens=counts,
        logit_size=_logit_sizes(weights, read, position),
        stream_in=before,
        stream_out=after,
        log_cubic=_cubic(R, read, tensors) if cubic else None,
        gains=gains,
        sum_gains=sum_gains,
        sum_out=sum_out,
        at_floor=size <= floor * float(torch.linalg.vector_norm(read)) or not rounding < MOST_ROUNDING,
        rounding=rounding,
        sum_rounding=sum_rounding,
        heads_gap=math.nan if left is None else _departure(left, _made_up(R, P, tensors, shared)),
        row_gap=float((P.sum(-1) - 1).abs().max()),
        outside=outside,
        score_gap=_score_gap(P, edges, scores) if position == "none" and not weights.qk_norm else math.nan,
        score_rounding=floor * (1 + scores.largest),
        logit_spread=logits,
        alone_gap=_alone_gap(seen),
        sphere_gap=_sphere_gap(seen),
        bias=float(torch.linalg.vector_norm((tensors.b_V[:, None] @ tensors.W_O).sum((0, 1)) + tensors.b_O)),
        unit=floor,
        entropy_floor=floor * read.shape[0],
        stream_at_floor=after.mu <= 4 * steady * after.norm,
    )


class _Scores(NamedTuple):
    """Scale times query times key of each head, and the largest sum of moduli on the way to one."""

    values: Tensor
    largest: float


def _scores(weights: HeadWeights, read: Tensor) -> _Scores:
    W_Q, W_K, b_Q, b_K = (
        part.detach().to(torch.float64) for part in (weights.W_Q, weights.W_K, weights.b_Q, weights.b_K)
    )
    Q, K = read @ W_Q + b_Q[:, None], read @ W_K + b_K[:, None]
    on_the_way = abs(weights.scale) * (Q.abs() @ K.abs().mT)
    return _Scores(weights.scale * (Q @ K.mT), float(on_the_way.max()))


def _score_gap(P: Tensor, edges: Tensor, scores: _Scores) -> float:
    """How far attention is from the softmax of the scores over the tokens that a row sees."""
    expected = torch.softmax(scores.values.masked_fill(~edges, -torch.inf), -1)
    return float((P - expected).abs().max())


def _made_up(R: Tensor, P: Tensor, tensors: HeadTensors, shared: Tensor) -> Tensor:
    """The residual after attention from its heads; what tokens share enters where rows add up to different sums."""
    sums = P.sum(-1)
    uneven = (sums - sums.mean(-1, keepdim=True))[..., None] * shared[:, None]
    return centred(((P @ (R @ tensors.W_V) + uneven) @ tensors.W_O).sum(0))


def _forward_error(read: Tensor, P: Tensor, tensors: HeadTensors, scores: float) -> float:
    """Frobenius norm of the rounding of attention's output, in units of the format's.

    Values, attention, mixed values and output are stored, and each is off by a unit of itself; sums are off by a unit
    of the root of their summed squares. Errors of different entries are taken as independent. Attention is off by a
    unit of each score as well, where the softmax has not decided.
    """
    V, W_O = read @ tensors.W_V + tensors.b_V[:, None], tensors.W_O.square()
    terms = read.square() @ tensors.W_V.square() + tensors.b_V[:, None].square() + V.square()
    undecided = scores * (P * (1 - P)).sum(-1).amax(-1)  # one-hot rows do not move when scores are rounded
    moved = undecided[:, None, None].square() * centred(V).square()
    mixed = P.square() @ (terms + moved) + (P @ V).square()
    given = ((P @ V) @ tensors.W_O).sum(0) + tensors.b_O
    return float(((mixed @ W_O).sum() + given.square().sum()).sqrt())


def _relative(error: float, left: Tensor) -> float:
    size = float(torch.linalg.vector_norm(left))
    return error / size if size > 0 else math.inf


def _departure(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of what was found; 0 where there is no difference."""
    gap = torch.linalg.vector_norm(found - expected)
    return float(gap / torch.linalg.vector_norm(found)) if bool(gap) else 0.0


def _alone_gap(seen: SeenLayer) -> float:
    if seen.given is None:
        return math.nan
    return max(_departure(seen.entry, seen.read), _departure(seen.given, seen.out))


def _sphere_gap(seen: SeenLayer) -> float:
    """Attention of the stream, then each token scaled; all tokens of one length before and after, whichever it is."""
    if seen.given is None:
        return math.nan
    given, out, entry = (torch.linalg.vector_norm(x, dim=-1) for x in (seen.given, seen.out, seen.entry))
    turned = torch.linalg.vector_norm(seen.out / out[:, None] - seen.given / given[:, None], dim=-1)
    uneven = torch.cat((out / out.mean() - 1, entry / entry.mean() - 1)).abs()
    return max(_departure(seen.entry, seen.read), float(turned.max()), float(uneven.max()))


def _cubic(R: Tensor, read: Tensor, tensors: HeadTensors) -> tuple[float, float]:
    found = cubic_interval(R, tensors, read.mean(0))
    return float(found.log_lower_bound), float(found.log_upper_bound)


def _gains(R: Tensor, P: Tensor, tensors: HeadTensors, shared: Tensor, gain: float, steps: int) -> LayerGains:
    return layer_gains(R, P, tensors.W_V, tensors.W_O, shared=shared, skip_gain=gain, steps=steps)


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


def _sharpest_rows(P: Tensor) -> tuple[tuple[float, ...], tuple[int, ...], tuple[float, ...]]:
    """Per head the least entropy of a row that sees at least two tokens, how many it sees, and how its logits spread.

    Logits are known from attention but for a constant, and no constant makes their norm smaller than taking off the
    mean. Attention that underflowed counts as the least number above zero, which only makes the spread smaller.
    """
    entropy = -torch.special.xlogy(P, P).sum(-1)
    sees = (P > 0).any(0).sum(-1)
    if int(sees.max()) < 2:
        return (), (), ()
    entropy = entropy.masked_fill(sees < 2, torch.inf)
    rows = entropy.argmin(-1)
    least = entropy.gather(-1, rows[:, None]).squeeze(-1).clamp_min(0.0)
    seen = (P > 0).any(0)[rows]
    logits = P[torch.arange(P.shape[0]), rows].clamp_min(5e-324).log().masked_fill(~seen, 0.0)
    mean = logits.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
    spread = torch.linalg.vector_norm((logits - mean).masked_fill(~seen, 0.0), dim=-1)
    return tuple(least.tolist()), tuple(sees[rows].tolist()), tuple(spread.tolist())


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
