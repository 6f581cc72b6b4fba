"""What ``bound`` reads from a model: heads, gains and residuals of each layer, as the theorems need them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankscope.errors import InputError, UnsupportedConfigError
from rankscope.ext.paths.capture import run_frozen
from rankscope.ext.paths.maps import Chain, Gain
from rankscope.ext.paths.network import FrozenBlock, FrozenStep, SeenAttention
from rankscope.ext.theory.attention_graph import attention_graph, least_edge
from rankscope.ext.theory.contraction import LayerGains, layer_gains
from rankscope.ext.theory.lipschitz import LipschitzConstants, gated_constants, mlp_constants
from rankscope.ext.theory.mlp_weights import mlp_weights
from rankscope.ext.theory.operator_norms import (
    composite_norm,
    composite_residual,
    inf_norm,
    one_norm,
    product_norm,
    score_spread,
    spectral_bound,
)
from rankscope.ext.theory.theorems import MOST_ROUNDING, HeadSizes, LayerQuantities, Network, Passage, StreamState
from rankscope.linalg.attention_weights import HeadTensors
from rankscope.linalg.cubic_law import cubic_interval
from rankscope.linalg.precision import as_float64, float_floor
from rankscope.linalg.scaled import centred
from rankscope.models.heads import HeadWeights, head_weights
from rankscope.models.heads.family import family_of
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView
from rankscope.stream.mode import reading_weights


@dataclass(frozen=True)
class Measured:
    """One sequence in one stack."""

    stack: str | None
    sequence: int
    network: Network
    layers: tuple[LayerQuantities, ...]


@dataclass(frozen=True)
class StepFacts:
    """What one step of a network is made of.

    Attributes:
        attends: it adds attention.
        bare: attention reads the stream itself, and its output is added unchanged.
        has_skip: there is a skip.
        has_source: something other than attention is added.
        is_mlp: an MLP is added.
        is_nothing: the stream passes unchanged, as after surgery that removed the branch.
    """

    attends: bool
    bare: bool
    has_skip: bool
    has_source: bool
    is_mlp: bool
    is_nothing: bool

    @classmethod
    def of(cls, step: FrozenStep) -> StepFacts:
        """The facts of a frozen step."""
        return cls(
            attends=step.heads is not None,
            bare=step.before.is_identity and step.after.is_identity,
            has_skip=step.skip is not None,
            has_source=step.source is not None,
            is_mlp=step.source is not None and step.origin == "mlp",
            is_nothing=step.skip is not None and step.skip.is_identity and not step.constants(),
        )


@dataclass
class Found:
    """The readings of one batch: for each sequence one entry per layer, the facts of the steps, width and QK-norm."""

    layers: list[list[LayerQuantities]]
    steps: list[StepFacts] = field(default_factory=list)
    width: int = 0
    qk_norm: bool = False


def head_sizes(weights: HeadWeights) -> tuple[HeadSizes, ...]:
    """Norms of the weight products of each head, computed head by head."""
    sizes = []
    for head in range(weights.heads):
        group = int(weights.kv_of_head[head])
        W_Q, W_K, W_V, W_O = (
            as_float64(part.detach())
            for part in (weights.W_Q[head], weights.W_K_groups[group], weights.W_V_groups[group], weights.W_O[head])
        )
        value = W_V @ W_O
        square = W_V.shape[0] == W_V.shape[1] == W_O.shape[1]
        sizes.append(
            HeadSizes(
                score_one=float(one_norm(W_Q @ W_K.T)),
                score_spectral=float(product_norm(W_Q[None], W_K[None])),
                value_one=float(one_norm(value)),
                value_inf=float(inf_norm(value)),
                value_spectral=float(product_norm(W_V[None], W_O.T[None])),
                value_least=float(torch.linalg.svdvals(value)[-1]) if square else 0.0,
            )
        )
    return tuple(sizes)


def mlp_size(block: nn.Module, config: Any) -> tuple[LipschitzConstants | None, str]:
    """The certified constant of the block's MLP, or why there is none."""
    try:
        read = mlp_weights(block, config)
        if read.W_gate is None:
            return mlp_constants(read.W_in, read.W_out, read.activation), ""
        assert read.radius is not None
        return gated_constants(read.W_gate, read.W_in, read.W_out, read.activation, read.radius), ""
    except (UnsupportedConfigError, InputError) as error:
        return None, str(error)


def stream_state(X: Tensor) -> StreamState:
    """The facts about the stream, (tokens, dim), that the theorems on masks need."""
    X = as_float64(X)
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
    """Largest distance between two tokens; centred first, to keep precision if tokens are close."""
    R = centred(X)
    gram = R @ R.T
    own = gram.diagonal()
    return float((own[:, None] + own - 2 * gram).max().clamp_min(0.0).sqrt())


def skip_gain_of(step: FrozenStep) -> float | None:
    """The gain of the skip, if stream plus branch is a linear map of the residual alone; otherwise None."""
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


@dataclass(frozen=True, eq=False)
class SeenLayer:
    """One sequence in one layer as the model computed it, (tokens, dim) in float64 each; padding is left out.

    Attributes:
        entry: the stream before the block.
        read: the input of attention.
        given: the output of attention; None if it was not observed.
        summed: stream plus attention.
        out: the stream after the block.
        beside: norm of what was added together with attention and subtracted again here (a parallel MLP).
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
    cubic: bool = True,
    outside: float = 0.0,
) -> Passage:
    """One sequence through one layer.

    Args:
        weights: weights of its heads, in the dtype of the model.
        seen: what the model computed.
        P: (heads, tokens, tokens).
        skip_gain: gain of the skip, if attention reads the stream itself; otherwise None.
        position: how positions enter the scores.
        floor: relative residual below which there is only rounding.
        cubic: also evaluate the cubic law, if it applies.
        outside: the largest share of a row that goes to tokens that are not measured.
    """
    tensors = _tensors(weights)
    read, R = seen.read, centred(seen.read)
    spread = score_spread(R, tensors)
    edge, edges = least_edge(P)
    graph = attention_graph(edges)
    cubic = cubic and graph.complete and position == "none" and not weights.qk_norm
    entropy, counts, logits = _sharpest_rows(P)
    shared = (read.mean(0) @ tensors.W_V) + tensors.b_V
    gains = _gains(R, P, tensors, shared, 0.0)
    left = None if seen.given is None else centred(seen.given)
    size = float(torch.linalg.vector_norm(R))
    scores = _scores(weights, read)
    error = math.hypot(_forward_error(read, P, tensors, scores.largest), seen.beside) * floor
    rounding = math.nan if left is None else _relative(error, left)
    sum_gains, sum_out, sum_rounding = None, math.nan, math.nan
    if skip_gain is not None and seen.summed is not None:
        kept = centred(seen.summed)
        sum_gains = _gains(R, P, tensors, shared, skip_gain)
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
    W_Q, W_K, b_Q, b_K = (as_float64(part.detach()) for part in (weights.W_Q, weights.W_K, weights.b_Q, weights.b_K))
    Q, K = read @ W_Q + b_Q[:, None], read @ W_K + b_K[:, None]
    on_the_way = abs(weights.scale) * (Q.abs() @ K.abs().mT)
    return _Scores(weights.scale * (Q @ K.mT), float(on_the_way.max()))


def _score_gap(P: Tensor, edges: Tensor, scores: _Scores) -> float:
    """How far attention is from the softmax of the scores over the tokens that a row sees."""
    expected = torch.softmax(scores.values.masked_fill(~edges, -torch.inf), -1)
    return float((P - expected).abs().max())


def _made_up(R: Tensor, P: Tensor, tensors: HeadTensors, shared: Tensor) -> Tensor:
    """The residual after attention from its heads; the common part of the tokens enters if rows have different sums."""
    sums = P.sum(-1)
    uneven = (sums - sums.mean(-1, keepdim=True))[..., None] * shared[:, None]
    return centred(((P @ (R @ tensors.W_V) + uneven) @ tensors.W_O).sum(0))


def _forward_error(read: Tensor, P: Tensor, tensors: HeadTensors, scores: float) -> float:
    """Frobenius norm of the rounding of attention's output, in units of the format's.

    Values, attention, mixed values and output are stored, and each is off by a unit of itself; sums are off by a unit
    of the root of their summed squares. Errors of different entries are taken as independent. Attention is also off by
    a unit of each score, unless its row is one-hot.
    """
    V, W_O = read @ tensors.W_V + tensors.b_V[:, None], tensors.W_O.square()
    terms = read.square() @ tensors.W_V.square() + tensors.b_V[:, None].square() + V.square()
    undecided = scores * (P * (1 - P)).sum(-1).amax(-1)  # rounding the scores does not change one-hot rows
    moved = undecided[:, None, None].square() * centred(V).square()
    mixed = P.square() @ (terms + moved) + (P @ V).square()
    given = ((P @ V) @ tensors.W_O).sum(0) + tensors.b_O
    return float(((mixed @ W_O).sum() + given.square().sum()).sqrt())


def _relative(error: float, left: Tensor) -> float:
    size = float(torch.linalg.vector_norm(left))
    return error / size if size > 0 else math.inf


def _departure(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference relative to the norm of the found value; 0 if there is no difference."""
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
    interval = cubic_interval(R, tensors, read.mean(0))
    return float(interval.log_lower_bound), float(interval.log_upper_bound)


def _gains(R: Tensor, P: Tensor, tensors: HeadTensors, shared: Tensor, gain: float) -> LayerGains:
    return layer_gains(R, P, tensors.W_V, tensors.W_O, shared=shared, skip_gain=gain)


def _tensors(weights: HeadWeights) -> HeadTensors:
    """Per head, in float64."""
    wide = [as_float64(part.detach()) for part in (weights.W_Q, weights.W_K, weights.W_V, weights.W_O)]
    return HeadTensors(
        W_Q=wide[0],
        W_K=wide[1],
        W_V=wide[2],
        W_O=wide[3],
        b_Q=as_float64(weights.b_Q.detach()),
        b_V=as_float64(weights.b_V.detach()),
        b_O=as_float64(weights.b_O.detach()),
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
    logits = P[torch.arange(P.shape[0], device=P.device), rows].clamp_min(5e-324).log().masked_fill(~seen, 0.0)
    mean = logits.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
    spread = torch.linalg.vector_norm((logits - mean).masked_fill(~seen, 0.0), dim=-1)
    return tuple(least.tolist()), tuple(sees[rows].tolist()), tuple(spread.tolist())


def _logit_sizes(weights: HeadWeights, read: Tensor, position: str) -> tuple[float, ...]:
    """Per head a bound on the norm of a row of scores, from weights and tokens; NaN if more enters the scores."""
    if weights.qk_norm or position not in ("none", "rotary"):
        return (math.nan,) * weights.heads
    X = torch.cat((read, read.new_ones(read.shape[0], 1)), -1)
    size = spectral_bound(X) ** 2
    sizes = []
    for head in range(weights.heads):
        group = int(weights.kv_of_head[head])
        W_Q = _with_bias(weights.W_Q[head], weights.b_Q[head])
        W_K = _with_bias(weights.W_K_groups[group], weights.b_K_groups[group])
        if weights.rotary:
            queries = torch.linalg.vector_norm(X @ W_Q, dim=-1).max()
            sizes.append(weights.scale * float(queries * torch.linalg.vector_norm(X @ W_K)))
        else:
            sizes.append(weights.scale * float(product_norm(W_Q[None], W_K[None])) * size)
    return tuple(sizes)


def _with_bias(W: Tensor, b: Tensor) -> Tensor:
    return torch.cat((as_float64(W.detach()), as_float64(b.detach())[None]), 0)


class LayerWeights(NamedTuple):
    """The weights of the heads of a block and their norms, and the constants of its MLP or why there are none."""

    heads: HeadWeights
    sizes: tuple[HeadSizes, ...]
    mlp: LipschitzConstants | None
    mlp_note: str


@dataclass(eq=False)
class BoundReader:
    """Reads batches block by block; stores numbers, never tensors.

    Args:
        view: the model and its structure.
        config: its configuration.
        has_norm: whether a norm acts anywhere in a block.
    """

    view: ModelView
    config: Any
    has_norm: bool = True
    dtypes: set[torch.dtype] = field(default_factory=set)
    lengths: dict[str | None, dict[int, int]] = field(default_factory=dict)
    _weights: dict[str, LayerWeights] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._modules = self.view.modules()
        self._names = {
            (stack.name, call.first_layer + offset): call.module_name
            for stack in self.view.stacks
            for call in stack.calls
            for offset in range(len(call.blocks))
        }
        self.position = position_of(self.config)

    def read_part(self, batch: Batch, before: Tensor | None = None) -> dict[str | None, Found]:
        """Run the model, or the part of it after the block that returned ``before``."""
        entries: dict[str | None, Tensor] = {}
        by_stack: dict[str | None, Found] = {}

        def begin(stack: str | None, entry: Tensor) -> None:
            entries[stack], by_stack[stack] = entry, Found([[] for _ in range(entry.shape[0])])

        def through(block: FrozenBlock) -> None:
            if block.is_final:
                return
            for number, layer in enumerate(self._layers(block, entries[block.stack], batch)):
                by_stack[block.stack].layers[number] += layer
            found, weights = by_stack[block.stack], self._of(block).heads
            found.steps += [StepFacts.of(step) for step in block.steps]
            found.width, found.qk_norm = weights.W_Q.shape[1], found.qk_norm or weights.qk_norm
            self.dtypes.add(block.out.dtype)
            entries[block.stack] = as_float64(block.out)

        run_frozen(self.view, self.config, batch, begin, through, dtype=torch.float64, before=before, keep_seen=True)
        return by_stack

    def finished(self, stack: str | None, first_sequence: int, found: Found) -> list[Measured]:
        """The sequences of a batch that has gone through all blocks."""
        return [
            Measured(stack, first_sequence + number, self._network(found, layers), tuple(layers))
            for number, layers in enumerate(found.layers)
            if layers
        ]

    def _layers(self, block: FrozenBlock, entry: Tensor, batch: Batch) -> list[list[LayerQuantities]]:
        known = self._of(block)
        out = as_float64(block.out)
        if not bool(torch.isfinite(out).all()):
            raise InputError(
                f"Block {block.layer} returns values that are not finite, which no theorem covers. Use "
                "rankscope.measure to find out where they arise."
            )
        layers: list[list[LayerQuantities]] = [[] for _ in range(entry.shape[0])]
        for step in block.steps:
            if step.heads is None or step.seen is None:
                continue
            for number in range(entry.shape[0]):
                keep = _kept(batch, number, entry)
                self.lengths.setdefault(block.stack, {})[batch.first_sequence + number] = int(keep.sum())
                if int(keep.sum()) < 2:
                    continue
                P = step.heads.probs[number][:, keep]
                passage = passage_of(
                    known.heads,
                    _seen(step, step.seen, entry, out, number, keep),
                    P[:, :, keep],
                    skip_gain=skip_gain_of(step),
                    position=self.position,
                    floor=float_floor(block.out.dtype),
                    outside=float(P[:, :, ~keep].sum(-1).max()),
                )
                layers[number].append(
                    LayerQuantities(block.layer, passage, known.sizes, known.heads.scale, known.mlp, known.mlp_note)
                )
        return layers

    def _of(self, block: FrozenBlock) -> LayerWeights:
        name = self._names[(block.stack, block.layer)]
        if name not in self._weights:
            module = self._modules[name]
            with reading_weights():
                weights = head_weights(module, self.config)
                self._weights[name] = LayerWeights(weights, head_sizes(weights), *mlp_size(module, self.config))
        return self._weights[name]

    def _network(self, found: Found, layers: Sequence[LayerQuantities]) -> Network:
        attending = [step for step in found.steps if step.attends]
        bare, has_skip = all(step.bare for step in attending), any(step.has_skip for step in attending)
        cut = not has_skip and not any(step.has_source for step in found.steps)
        turns = [(True, False), (False, True)] * (len(found.steps) // 2)
        alternate = [(step.attends, step.is_mlp) for step in found.steps] == turns
        return Network(
            depth=len(layers),
            heads=max(len(layer.heads) for layer in layers),
            width=found.width,
            pure=bare and cut and all(step.attends or step.is_nothing for step in found.steps),
            only_mlp=bare and not self.has_norm and alternate and not any(step.has_skip for step in found.steps),
            has_skip=has_skip,
            row_scaling=bare and cut,
            bilinear=self.position == "none" and not found.qk_norm,
        )


def _seen(step: FrozenStep, seen: SeenAttention, entry: Tensor, out: Tensor, number: int, keep: Tensor) -> SeenLayer:
    """One sequence of a step, without padding."""

    def of(x: Tensor) -> Tensor:
        return as_float64(x[number, keep])

    return SeenLayer(
        entry=of(entry),
        read=of(seen.read),
        given=None if seen.given is None else of(seen.given),
        summed=of(seen.summed),
        out=of(out),
        beside=0.0 if step.source is None else float(torch.linalg.vector_norm(of(step.source))),
    )


def _kept(batch: Batch, number: int, entry: Tensor) -> Tensor:
    """Which tokens of a sequence are not padding."""
    keep = torch.ones(entry.shape[1], dtype=torch.bool, device=entry.device)
    if batch.keep is not None and batch.keep.shape[0] == entry.shape[0] and batch.keep.shape[1] <= entry.shape[1]:
        keep[:] = False
        keep[: batch.keep.shape[1]] = batch.keep[number].to(entry.device)
    return keep


def position_of(config: Any) -> str:
    """How positions enter the scores, from the family description; ``"unknown"`` if there are several."""
    try:
        return str(family_of(config).position)
    except UnsupportedConfigError:
        return "unknown"
