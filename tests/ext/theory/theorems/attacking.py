"""A search for networks that break a statement of ``bound``.

A small network is drawn from a seed (heads that share keys and values, values that are not square, sinks, biases, masks
that change from layer to layer), and Adam lowers the slack of one statement: bound and measured value are written here
once more, differentiably and apart from the library. What it ends at is then read by the library's own functions, in
float64 and in float32, and every statement is evaluated on it. No statement may be broken with its hypotheses met.
"""

# The names follow the algebra.
# ruff: noqa: N815

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankscope.ext.theory.bound.reading import SeenLayer, head_sizes, passage_of
from rankscope.ext.theory.lipschitz import SLOPES, mlp_constants
from rankscope.ext.theory.operator_norms import composite_norm, one_norm
from rankscope.ext.theory.theorems import THEOREMS, Evaluation, LayerQuantities, Network
from rankscope.linalg.precision import float_floor
from rankscope.linalg.scaled import centred
from rankscope.models.heads import HeadWeights

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}
TWISTS = ("none",) * 6 + ("sink", "cap", "temperature", "distance", "bias")
"""What is done to the scores behind the back of the weights; statements that start from weights must notice."""

WELL_MEASURED = 1e-9
"""Rounding of a measured value, in natural logarithm, up to which its slack is worth telling."""


@dataclass
class Design:
    """One network: sizes, masks, what stands around attention, and its parameters in float64."""

    tokens: int
    dim: int
    heads: int
    groups: int
    masks: list[Tensor]
    skip: float = 0.0
    unit: bool = False
    orthogonal: bool = False
    bounded: bool = False
    activation: str | None = None
    twist: str = "none"
    parameters: dict[str, Tensor] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return len(self.masks)


@dataclass
class Pass:
    """One layer of a forward pass, differentiable."""

    entry: Tensor
    P: Tensor
    given: Tensor
    summed: Tensor
    out: Tensor
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    b_Q: Tensor
    b_V: Tensor
    b_O: Tensor
    scale: float
    mlp: tuple[Tensor, Tensor] | None


def random_mask(rng: random.Random, tokens: int) -> Tensor:
    """Complete, causal, a window, a star, a tree with a bridge, or random, each with self-loops."""
    full = torch.ones(tokens, tokens, dtype=torch.bool)
    eye = torch.eye(tokens, dtype=torch.bool)
    kind = rng.randrange(7)
    if kind == 0:
        return full
    if kind == 1:
        return full.tril()
    if kind == 2:
        return full.tril(1) & full.triu(-1)
    if kind == 3:
        return full.tril() & full.triu(-rng.randint(1, 2))
    order = list(range(tokens))
    rng.shuffle(order)
    mask = eye.clone()
    if kind == 4:
        mask[:, order[0]] = True
    elif kind == 5:
        half = max(1, tokens // 2)
        mask[order[:half], order[0]] = True
        for token in order[half:]:
            mask[token, order[half]] = True
        mask[order[half % tokens], order[0]] = True
    else:
        mask |= torch.tensor([[rng.random() < 0.35 for _ in order] for _ in order])
    return mask


def strong_mask(rng: random.Random, tokens: int) -> Tensor:
    """A cycle through all tokens, self-loops, and some more."""
    order = list(range(tokens))
    rng.shuffle(order)
    mask = torch.eye(tokens, dtype=torch.bool)
    mask[order, order[1:] + order[:1]] = True
    more = rng.choice((0.0, 0.2, 1.0))
    return mask | torch.tensor([[rng.random() < more for _ in order] for _ in order])


def turning_trees(tokens: int, depth: int) -> list[Tensor]:
    """Trees of depth two, the root in one half and a bridge into the other; halves change places at every layer."""
    half = tokens // 2
    halves, found = (list(range(half)), list(range(half, tokens))), []
    for layer in range(depth):
        own, other = halves[layer % 2], halves[1 - layer % 2]
        root, bridge = own[-1], other[(layer // 2) % (half - 1)]
        mask = torch.eye(tokens, dtype=torch.bool)
        mask[[*own, bridge], root] = True
        mask[[t for t in other if t != bridge], bridge] = True
        found.append(mask)
    return found


def design(name: str, seed: int) -> Design:
    """The network of this seed that the search on this statement starts from."""
    rng = random.Random(f"{name}:{seed}")
    tokens, dim = rng.randint(2, 7), rng.randint(1, 6)
    heads = rng.choice((1, 1, 2, 3, 4))
    groups = rng.choice([g for g in range(1, heads + 1) if heads % g == 0])
    full = torch.ones(tokens, tokens, dtype=torch.bool)
    found = Design(tokens, dim, heads, groups, [full], twist=rng.choice(TWISTS))
    if name in ("contraction_interval", "skip_interval") and rng.random() < 0.3:
        found.twist = "sink"
    if name in ("contraction_interval", "skip_interval", "zhai_2023_entropy"):
        found.masks = [random_mask(rng, tokens) for _ in range(rng.choice((1, 1, 2, 3)))]
        found.skip = rng.choice((1.0, 1.0, -0.5, 0.3)) if name == "skip_interval" else 0.0
    elif name.startswith("wu"):
        found.heads = found.groups = 1
        changing = rng.random() < 0.7
        draw = strong_mask if name == "wu_2024_layernorm" else random_mask
        masks = [draw(rng, tokens) for _ in range(rng.randint(2, 9))]
        found.masks = masks if changing else [masks[0]] * len(masks)
        if name != "wu_2024_layernorm" and rng.random() < 0.3:
            found.tokens = rng.choice((8, 10, 12))
            found.masks = turning_trees(found.tokens, rng.randint(4, 9))
        found.unit = found.orthogonal = name != "wu_2024_masks"
        found.bounded = name == "wu_2024_masks"
        if found.unit:
            found.dim = rng.randint(max(2, tokens), tokens + 2) if name == "wu_2024_layernorm" else max(2, dim)
    elif name.startswith("dong"):
        found.masks = [full] * rng.choice((1, 1, 2))
        found.activation = rng.choice(tuple(ACTIVATIONS)) if name == "dong_2021_mlp" else None
        if name == "dong_2021_single_head":
            found.heads = found.groups = 1
    generator = torch.Generator().manual_seed(seed)
    found.parameters = _drawn(found, rng, generator)
    if found.tokens > 7 or rng.random() < 0.1:
        # two groups that hold opposite things: as far apart as the range of their columns allows
        X = found.parameters["X"]
        sign = torch.where(torch.arange(found.tokens) < found.tokens // 2, 1.0, -1.0).double()
        found.parameters["X"] = sign[:, None] * X[:1].sign() + 0.1 * X
    return found


def _drawn(found: Design, rng: random.Random, generator: torch.Generator) -> dict[str, Tensor]:
    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    d_qk, d_v = rng.randint(1, 3), rng.randint(1, 4)
    square = found.orthogonal or (found.bounded and rng.random() < 0.7)
    d_v = found.dim if square else d_v
    near = 10 ** rng.uniform(-5, 0.5)
    sharp = 10 ** rng.uniform(-1.5, 0.7)
    X = rng.choice((0.0, 1.0, 3.0)) * rand(1, found.dim) + near * rand(found.tokens, found.dim)
    X = rand(found.tokens, found.dim).abs() if found.unit and rng.random() < 0.6 else X
    drawn = {"X": X}
    # values that keep what they are given, and attention that is uniform over what a token sees
    calm = found.bounded and square and rng.random() < 0.6
    eye = torch.eye(found.dim, dtype=torch.float64)
    sharp = 0.01 * sharp if calm else sharp
    for layer in range(found.depth):
        drawn |= {
            f"{layer}.W_Q": sharp * rand(found.heads, found.dim, d_qk),
            f"{layer}.W_K": rand(found.groups, found.dim, d_qk),
            f"{layer}.W_V": eye + 0.02 * rand(1, d_v, d_v) if calm else rand(found.groups, found.dim, d_v),
            f"{layer}.W_O": eye + 0.02 * rand(1, d_v, d_v) if calm else rand(found.heads, d_v, found.dim),
            f"{layer}.b_Q": (0.01 if calm else rng.choice((0.0, 1.0))) * rand(found.heads, d_qk),
        }
        if rng.random() < 0.4 and not (found.unit and rng.random() < 0.8):
            drawn |= {f"{layer}.b_V": rand(found.groups, d_v), f"{layer}.b_O": rand(found.dim)}
        if found.twist == "sink":
            drawn[f"{layer}.twist"] = rng.uniform(-8, 2) + rand(found.heads)
        elif found.twist != "none":
            drawn[f"{layer}.twist"] = rand(found.heads, found.tokens, found.tokens)
        if found.activation is not None:
            width = rng.randint(1, 4)
            drawn |= {f"{layer}.W_1": rand(found.dim, width), f"{layer}.W_2": rand(width, found.dim)}
    return drawn


def _orthogonal(W: Tensor) -> Tensor:
    return torch.linalg.matrix_exp(W - W.mT)


def forward(found: Design, parameters: dict[str, Tensor]) -> list[Pass]:
    """Every layer, in the format of the parameters."""
    X = parameters["X"]
    if found.unit:
        X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    layers = []
    for number, mask in enumerate(found.masks):
        own = {key.split(".")[1]: value for key, value in parameters.items() if key.startswith(f"{number}.")}
        share = torch.arange(found.heads) // (found.heads // found.groups)
        W_Q, W_K, W_V, W_O = own["W_Q"], own["W_K"][share], own["W_V"][share], own["W_O"]
        if found.orthogonal:
            eye = torch.eye(found.dim, dtype=X.dtype)
            W_V, W_O = _orthogonal(W_V), eye.expand_as(W_O)
        elif found.bounded:
            W_V = W_V / (torch.linalg.matrix_norm(W_V @ W_O, 2)[:, None, None] * (1 + 1e-7))
        b_Q = own["b_Q"]
        b_V = own["b_V"][share] if "b_V" in own else W_V.new_zeros(found.heads, W_V.shape[2])
        b_O = own.get("b_O", W_O.new_zeros(found.dim))
        scale = W_Q.shape[2] ** -0.5
        scores = scale * (X @ W_Q + b_Q[:, None]) @ (X @ W_K).mT
        P = _attention(found, scores, mask, own.get("twist"))
        given = (P @ (X @ W_V + b_V[:, None]) @ W_O).sum(0) + b_O
        summed = given + found.skip * X
        mlp = (own["W_1"], own["W_2"]) if found.activation is not None else None
        out = summed if mlp is None else ACTIVATIONS[found.activation or ""](summed @ mlp[0]) @ mlp[1]
        out = out / torch.linalg.vector_norm(out, dim=-1, keepdim=True) if found.unit else out
        layers.append(Pass(X, P, given, summed, out, W_Q, W_K, W_V, W_O, b_Q, b_V, b_O, scale, mlp))
        X = out
    return layers


def _attention(found: Design, scores: Tensor, mask: Tensor, twist: Tensor | None) -> Tensor:
    if found.twist == "cap":
        scores = 2 * torch.tanh(scores / 2)
    elif found.twist == "temperature":
        scores = scores * 1.7
    elif found.twist == "distance":
        place = torch.arange(scores.shape[-1], dtype=scores.dtype)
        scores = scores - (place[:, None] - place).abs()
    elif found.twist == "bias" and twist is not None:
        scores = scores + twist
    scores = scores.masked_fill(~mask, -torch.inf)
    if found.twist == "sink" and twist is not None:
        scores = torch.cat((scores, twist[:, None, None].expand(-1, scores.shape[1], 1)), -1)
        return torch.softmax(scores, -1)[..., :-1]
    return torch.softmax(scores, -1)


def evaluations(found: Design, layers: Sequence[Pass], dtype: torch.dtype) -> list[Evaluation]:
    """What the library says of the network, statement by statement."""
    quantities = []
    for number, one in enumerate(layers):
        weights = HeadWeights(
            W_Q=one.W_Q,
            W_K_groups=one.W_K,
            W_V_groups=one.W_V,
            W_O=one.W_O,
            b_Q=one.b_Q,
            b_K_groups=torch.zeros_like(one.b_Q),
            b_V_groups=one.b_V,
            b_O=one.b_O,
            kv_of_head=torch.arange(one.W_Q.shape[0]),
            scale=one.scale,
            rotary=False,
            qk_norm=False,
        )
        seen = SeenLayer(*(x.double() for x in (one.entry, one.entry, one.given, one.summed, one.out)))
        passage = passage_of(
            weights,
            seen,
            one.P.double(),
            skip_gain=found.skip or None,
            position="none",
            floor=float_floor(dtype),
        )
        constants = None if one.mlp is None else mlp_constants(*one.mlp, found.activation or "")
        quantities.append(LayerQuantities(number, passage, head_sizes(weights), one.scale, constants))
    cut = not found.skip and found.activation is None
    network = Network(
        depth=len(layers),
        heads=found.heads,
        width=found.dim,
        pure=cut and not found.unit,
        only_mlp=found.activation is not None and not found.skip and not found.unit,
        has_skip=bool(found.skip),
        row_scaling=cut and found.unit,
    )
    return [entry.function(network, quantities) for entry in THEOREMS.values()]


# the slack of each statement, once more: (differentiable log slacks, penalties that must not be above zero)
Slacks = tuple[list[Tensor], list[Tensor]]


def _sizes(one: Pass) -> tuple[Tensor, Tensor, Tensor]:
    return centred(one.entry), torch.linalg.vector_norm(centred(one.entry)), centred(one.given)


def _upper_and_lower(one: Pass) -> tuple[Tensor, Tensor, Tensor]:
    """Ends for the given singular values of the values, and the leak, none divided by the residual."""
    R, _, _ = _sizes(one)
    s = torch.linalg.svdvals(centred(one.P) - centred(one.P).mean(-1, keepdim=True))[:, :-1]
    sigma = torch.linalg.svdvals(R @ one.W_V)[:, : s.shape[1]]
    out = torch.linalg.svdvals(one.W_O.flatten(0, 1))
    least = out[-1] if one.W_O.flatten(0, 1).shape[0] <= one.W_O.shape[2] else out[-1] * 0
    count = sigma.shape[1]
    upper = out[0] * torch.linalg.vector_norm(s[:, :count] * sigma)
    lower = least * torch.linalg.vector_norm(s.flip(-1)[:, :count] * sigma)
    missing = one.P.sum(-1) - 1
    shared = (one.entry.mean(0) @ one.W_V + one.b_V)[:, None] @ one.W_O
    return upper, lower, torch.linalg.vector_norm(centred((missing[..., None] * shared).sum(0)))


def _contraction(found: Design, layers: Sequence[Pass]) -> Slacks:
    slacks = []
    for one in layers:
        upper, lower, leak = _upper_and_lower(one)
        left = torch.linalg.vector_norm(_sizes(one)[2])
        slacks += [(upper + leak).log() - left.log(), left.log() - (lower - leak).clamp_min(1e-300).log()]
    return slacks, []


def _skip(found: Design, layers: Sequence[Pass]) -> Slacks:
    slacks = []
    for one in layers:
        upper, lower, leak = _upper_and_lower(one)
        base = abs(found.skip) * _sizes(one)[1]
        left = torch.linalg.vector_norm(centred(one.summed))
        least = torch.maximum(base - upper, lower - base) - leak
        slacks += [(base + upper + leak).log() - left.log(), left.log() - least.clamp_min(1e-300).log()]
    return slacks, []


def _cubic(found: Design, layers: Sequence[Pass]) -> Slacks:
    one = layers[0]
    R, _, left = _sizes(one)
    E = one.scale * (R @ one.W_Q) @ (R @ one.W_K).mT
    spread = E.amax(-1) - E.amin(-1)
    query = one.entry.mean(0) @ one.W_Q + one.b_Q
    pi = torch.softmax(one.scale * ((R @ one.W_K) @ query[..., None]).squeeze(-1), -1)[..., None]
    K, V = R @ one.W_K, R @ one.W_V @ one.W_O
    covariance = (K - (pi * K).sum(1, keepdim=True)).mT @ (pi * (V - (pi * V).sum(1, keepdim=True)))
    leading = torch.linalg.vector_norm(centred((one.scale * (R @ one.W_Q) @ covariance).sum(0)))
    rows = torch.linalg.vector_norm(V, dim=-1)
    diameter = torch.minimum(2 * rows.amax(-1), 2**0.5 * torch.linalg.vector_norm(rows, dim=-1))
    second = (diameter * torch.linalg.vector_norm(spread.square(), dim=-1) / 8).sum()
    whole = (diameter * torch.linalg.vector_norm(spread, dim=-1) / 4).sum()
    size = torch.linalg.vector_norm(left).log()
    return [
        torch.minimum(leading + second, whole).log() - size,
        size - (leading - second).clamp_min(1e-300).log(),
    ], []


def _dong(found: Design, layers: Sequence[Pass]) -> Slacks:
    slacks, limits, log_bound = [], [], composite_norm(centred(layers[0].entry)).log()
    for one in layers:
        R, _, left = _sizes(one)
        E = one.scale * (R @ one.W_Q) @ (R @ one.W_K).mT
        D = E.amax(-1) - E.amin(-1)
        gamma = ((D.sum(-1) * D.amax(-1)).sqrt() / (2 * one_norm(E))).amax()
        W = one.W_V @ one.W_O
        beta = (one_norm(one.W_Q @ one.W_K.mT) * composite_norm(W)).amax()
        factor = (4 * gamma * beta * found.heads * one.scale).log()
        measured = composite_norm(left)
        if one.mlp is not None:
            slope = SLOPES[found.activation or ""]
            factor = factor + (slope * composite_norm(one.mlp[0].abs() @ one.mlp[1].abs())).log()
            measured = composite_norm(centred(one.out))
        log_bound = factor + 3 * log_bound
        slacks += [factor + 3 * composite_norm(R).log() - measured.log(), log_bound - measured.log()]
        both = ((D.sum(-1) * one_norm(W)).sum() * (D.amax(-1) * W.abs().sum(-1).amax(-1)).sum()).sqrt()
        allowed = 2 * gamma * one.scale * beta * found.heads * composite_norm(R).square()
        limits += [D.max() - 1.2564, both / allowed - 1]
    return slacks, limits


def _reach(layers: Sequence[Pass], first: int, everyone: bool) -> list[tuple[int, int, int]]:
    """Windows by exact counting of walks: (last layer, length, tokens that reach all)."""
    found, walks, length = [], None, 0
    for number in range(first, len(layers)):
        seen = (layers[number].P > 0).any(0).long()
        walks = seen if walks is None else ((seen @ walks) > 0).long()
        length += 1
        sources = int((walks > 0).all(0).sum())
        if sources == seen.shape[0] or (sources and not everyone):
            found.append((number, length, sources))
            walks, length = None, 0
    return found


def _least_edge(layers: Sequence[Pass]) -> Tensor:
    return torch.stack([one.P.masked_fill(one.P <= 0, torch.inf).amin() for one in layers]).amin()


def _masks(found: Design, layers: Sequence[Pass]) -> Slacks:
    X, least = layers[0].entry, _least_edge(layers)
    log_bound = (torch.linalg.vector_norm(X.amax(0) - X.amin(0)) * found.tokens**0.5 / 2).log()
    ends, slacks = {last: length for last, length, _ in _reach(layers, 0, False)}, []
    for number, one in enumerate(layers):
        log_bound = log_bound + torch.linalg.matrix_norm(one.W_V @ one.W_O, 2).sum().log()
        if number in ends:
            log_bound = log_bound + torch.log1p(-(least ** ends[number]))
        slacks.append(log_bound - torch.linalg.vector_norm(centred(one.out)).log())
    return slacks, []


def _sphere(found: Design, layers: Sequence[Pass], *, everyone: bool) -> Slacks:
    least = _least_edge(layers)
    cosines = [(one.entry @ one.entry.mT).amin() for one in layers]
    since = next((n for n, c in enumerate(cosines) if c.item() >= 0), None)
    if since is None:
        return [], [-cosines[0]]
    log_bound = 0.5 * ((found.tokens - 1) * (1 - cosines[since])).log()
    ends, slacks = {last: (length, m) for last, length, m in _reach(layers, since, everyone)}, []
    for number in range(since, len(layers)):
        if number in ends:
            length, sources = ends[number]
            log_bound = log_bound + 0.5 * torch.log1p(-(sources * least ** (2 * length)).clamp_max(1 - 1e-12))
        slacks.append(log_bound - torch.linalg.vector_norm(centred(layers[number].out)).log())
    return slacks, [] if everyone else [-cosines[0]]


def _entropy(found: Design, layers: Sequence[Pass]) -> Slacks:
    slacks = []
    for one in layers:
        X = torch.cat((one.entry, one.entry.new_ones(found.tokens, 1)), -1)
        W_Q = torch.cat((one.W_Q, one.b_Q[:, None]), 1)
        W_K = torch.cat((one.W_K, torch.zeros_like(one.b_Q)[:, None]), 1)
        sigma = one.scale * torch.linalg.matrix_norm(W_Q @ W_K.mT, 2) * torch.linalg.matrix_norm(X, 2) ** 2
        counts = (one.P > 0).any(0).sum(-1)
        entropy = -torch.special.xlogy(one.P, one.P).sum(-1).masked_fill(counts < 2, -torch.inf)
        if int(counts.max()) < 2:
            continue
        T = counts[entropy.argmin(-1)].double()
        b = (-sigma * (T / (T - 1)).sqrt()).exp()
        lower = torch.log1p((T - 1) * b) + sigma * (T * (T - 1)).sqrt() * b / (1 + (T - 1) * b)
        slacks.append((entropy.amin(-1).log() - lower.log()).amin())
    return slacks, []


SLACKS: dict[str, Callable[[Design, Sequence[Pass]], Slacks]] = {
    "contraction_interval": _contraction,
    "skip_interval": _skip,
    "cubic_law_interval": _cubic,
    "dong_2021_single_head": _dong,
    "dong_2021_multi_head": _dong,
    "dong_2021_mlp": _dong,
    "wu_2024_masks": _masks,
    "wu_2024_nonnegative": lambda found, layers: _sphere(found, layers, everyone=False),
    "wu_2024_layernorm": lambda found, layers: _sphere(found, layers, everyone=True),
    "zhai_2023_entropy": _entropy,
}


@dataclass
class Outcome:
    """What one search came to.

    Attributes:
        slacks: per statement the least slack, in decades, among bounds whose hypotheses are met and whose measured
            value is free of rounding.
        broken: bounds that are broken with their hypotheses met.
        tested: bounds whose hypotheses are met, over all statements.
    """

    slacks: dict[str, float]
    broken: list[str]
    tested: int


def judged(found: Design, parameters: dict[str, Tensor]) -> Outcome:
    """The library's own verdict on a network, in float64 and in float32."""
    outcome = Outcome({}, [], 0)
    for dtype in (torch.float64, torch.float32):
        with torch.no_grad():
            layers = forward(found, {key: value.detach().to(dtype) for key, value in parameters.items()})
            if not all(bool(torch.isfinite(one.out).all()) for one in layers):
                continue
            for evaluation in evaluations(found, layers, dtype):
                _judge(evaluation, dtype, outcome)
    return outcome


def _judge(evaluation: Evaluation, dtype: torch.dtype, outcome: Outcome) -> None:
    broken = evaluation.violated
    outcome.broken += [f"{evaluation.theorem} {dtype} layer {b.layer}: {b}" for b in broken]
    if not all(h.holds for h in evaluation.hypotheses):
        return
    for bound in (*evaluation.layers, *([evaluation.depth] if evaluation.depth and evaluation.applies else [])):
        met = all(b.holds for b in evaluation.layers) if evaluation.cumulative else bound.holds
        if not met or bound.at_floor or bound.log_measured is None or not math.isfinite(bound.log_measured):
            continue
        ends = [bound.log_upper - bound.log_measured] if bound.log_upper is not None else []
        ends += [bound.log_measured - bound.log_lower] if bound.log_lower is not None else []
        outcome.tested += len(ends)
        if dtype == torch.float64:
            slack = min([x for x in ends if not math.isnan(x)], default=math.inf) / math.log(10)
            if bound.log_rounding > WELL_MEASURED:
                continue
            outcome.slacks[evaluation.theorem] = min(outcome.slacks.get(evaluation.theorem, math.inf), slack)


def attack(name: str, seed: int, steps: int = 60) -> Outcome:
    """Lower the slack of one statement from the network of this seed, and judge where it ends and on the way."""
    found = design(name, seed)
    parameters = {key: value.clone().requires_grad_() for key, value in found.parameters.items()}
    outcome = judged(found, parameters)
    rng = random.Random(seed)
    place = rng.choice((None, -1, -1, rng.randrange(100)))
    optimiser = torch.optim.Adam(list(parameters.values()), lr=10 ** rng.uniform(-2.5, -0.5))
    for step in range(1, steps + 1):
        slacks, limits = SLACKS[name](found, forward(found, parameters))
        usable = [s for s in slacks if bool(torch.isfinite(s)) and s.item() < 300]
        if not usable:
            break
        # a bound that is sharp and true would hold the search for ever if it always took the least slack
        aim = min(usable, key=lambda s: s.item()) if place is None else usable[place % len(usable)]
        loss = aim + 30 * sum((torch.relu(limit) for limit in limits), start=torch.zeros(()))
        optimiser.zero_grad()
        loss.backward()
        for value in parameters.values():
            if value.grad is not None:
                torch.nan_to_num_(value.grad, 0.0, 0.0, 0.0)
        optimiser.step()
        if step in (steps // 3, steps):
            _merge(outcome, judged(found, parameters))
    return outcome


def _merge(into: Outcome, other: Outcome) -> None:
    for name, slack in other.slacks.items():
        into.slacks[name] = min(into.slacks.get(name, math.inf), slack)
    into.broken += other.broken
    into.tested += other.tested
