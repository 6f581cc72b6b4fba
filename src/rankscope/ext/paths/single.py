"""Single paths: follow them, sample them, and estimate medians with intervals for a sample size fixed in advance."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from rankscope._citations import Cite
from rankscope.errors import InputError
from rankscope.ext.paths.census import census
from rankscope.ext.paths.lengths import lengths_of_interest
from rankscope.ext.paths.maps import Chain, FrozenNorm, Gain
from rankscope.ext.paths.network import FrozenHeads, FrozenNetwork, FrozenStep
from rankscope.linalg.tokens import Tokens
from rankscope.metrics.residual import relative_residual

Path = tuple[int | None, ...]
"""One entry per attention layer: the head that a path goes through, or None if it skips the layer."""

Weighting = Literal["uniform", "norm"]


@dataclass(frozen=True, eq=False)
class PathSample:
    """Paths of one length from the embedding.

    Attributes:
        length: number of heads each path goes through.
        paths: as drawn, with repeats.
        log_weights: (paths,), minus the log probability of each draw: ``exp(log_weight)`` times a path's stream is an
            unbiased estimate of the sum over all paths of the length.
        streams: (paths, batch, tokens, dim), the stream that each path carries to the end.
    """

    length: int
    paths: tuple[Path, ...]
    log_weights: Tensor
    streams: Tensor


@dataclass(frozen=True)
class MedianInterval:
    """A median, and an interval that contains the true one with at least this confidence."""

    estimate: float
    low: float
    high: float
    confidence: float


def follow(network: FrozenNetwork, paths: Sequence[Path]) -> Tensor:
    """The stream that each path carries from the embedding to the end: (paths, batch, tokens, dim). Exact.

    Raises:
        InputError: a path without exactly one entry per attention layer.
    """
    layers = [position for _, position in network.attention]
    if any(len(path) != len(layers) for path in paths):
        raise InputError(f"A path needs {len(layers)} entries here, a head or None for each attention layer.")
    choice = {position: [path[number] for path in paths] for number, position in enumerate(layers)}
    x = network.entry.expand(len(paths), *network.entry.shape)
    for position, step in enumerate(network.steps):
        x = _chosen(step, x, choice[position]) if position in choice else step.passed(x)
    return x


def _chosen(step: FrozenStep, x: Tensor, heads: Sequence[int | None]) -> Tensor:
    out = torch.empty_like(x)
    for head in set(heads):
        rows = torch.tensor([number for number, other in enumerate(heads) if other == head], device=x.device)
        out[rows] = step.passed(x[rows]) if head is None else step.attended(x[rows], head)
    return out


def sample_paths(
    network: FrozenNetwork, length: int, number: int, *, weighting: Weighting = "uniform", seed: int = 0
) -> PathSample:
    """Sample paths of one length.

    ``"uniform"`` draws each with equal probability. ``"norm"`` draws layer by layer, with odds given by the norm of the
    stream after each choice times the number of paths that complete it: paths with a large norm are drawn more often,
    and the weights compensate for it. Estimate.

    Raises:
        InputError: no path has this length.
    """
    generator = torch.Generator().manual_seed(seed)
    steps = [network.steps[position] for _, position in network.attention]
    heads = [step.heads.heads for step in steps if step.heads is not None]
    skips = [step.skip is not None for step in steps]
    table = _completions(heads, skips)
    if not 0 <= length <= len(heads) or table[0][length] == 0:
        raise InputError(f"length={length}: no path of this network has it; lengths go from 0 to {len(heads)}.")
    paths: list[Path] = []
    logs: list[float] = []
    for _ in range(number):
        path, log_probability = _draw(network, length, table, generator, by_norm=weighting == "norm")
        paths.append(path)
        logs.append(-log_probability)
    return PathSample(length, tuple(paths), torch.tensor(logs, dtype=torch.float64), follow(network, paths))


def _completions(heads: Sequence[int], skips: Sequence[bool]) -> list[list[int]]:
    """Number of ways to add a given length from a layer onwards."""
    tables = [census(heads[layer:], skips[layer:]).counts for layer in range(len(heads))] + [(1,)]
    return [[*counts, *([0] * (len(heads) + 1 - len(counts)))] for counts in tables]


def _draw(
    network: FrozenNetwork, length: int, table: list[list[int]], generator: torch.Generator, *, by_norm: bool
) -> tuple[Path, float]:
    path: list[int | None] = []
    left, log_probability, x = length, 0.0, network.entry
    for step in network.steps:
        if step.heads is None:
            x = step.passed(x[None])[0] if by_norm else x
            continue
        rest = table[len(path) + 1]
        ways = [rest[left] if step.skip is not None else 0] + [rest[left - 1] if left else 0] * step.heads.heads
        odds = [float(Fraction(way, table[0][length])) for way in ways]
        options = torch.cat([step.passed(x[None]), step.attended_each(x)]) if by_norm else None
        if options is not None:
            sizes = torch.linalg.vector_norm(options.double().flatten(1), dim=1).tolist()
            odds = [odd * size for odd, size in zip(odds, sizes, strict=True)]
        weights = torch.tensor(odds, dtype=torch.float64)
        picked = int(torch.multinomial(weights / weights.sum(), 1, generator=generator))
        log_probability += math.log(odds[picked] / float(weights.sum()))
        path.append(None if picked == 0 else picked - 1)
        left -= picked > 0
        x = options[picked] if options is not None else x
    return tuple(path), log_probability


def median_interval(values: Tensor, confidence: float = 0.95) -> MedianInterval:
    """The median of a sample and a distribution-free interval for the true one, from order statistics.

    The number of values below the true median is binomial(n, 1/2) for any distribution. Bound (on the confidence).
    """
    ordered = values.double().flatten().sort().values.tolist()
    number = len(ordered)
    tail, cut = 0.0, 0
    while cut < number // 2 and tail + math.comb(number, cut) / 2**number <= (1 - confidence) / 2:
        tail += math.comb(number, cut) / 2**number
        cut += 1
    low, high = (-math.inf, math.inf) if cut == 0 else (ordered[cut - 1], ordered[number - cut])
    return MedianInterval(statistics.median(ordered) if number else math.nan, low, high, confidence)


_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class TopPaths:
    """The paths with the largest Frobenius norm at the end that a beam search found.

    Attributes:
        paths: the largest first.
        norms: norm of each path's stream, over the whole batch.
        pruned_bound: upper bound on the norm of any pruned path. Bound; 0 if none was pruned.
        certified: whether every pruned path is below the last one listed, so that these are the true top paths.
    """

    paths: tuple[Path, ...]
    norms: tuple[float, ...]
    pruned_bound: float
    certified: bool


def top_paths(network: FrozenNetwork, count: int, *, length: int | None = None, beam: int = 256) -> TopPaths:
    r"""Search layer by layer, keeping the ``beam`` prefixes with the largest norms.

    A pruned prefix has at the end at most its norm times the product of the largest gains of the remaining steps: a
    skipped step's operator norm, or that of its largest head, :math:`\|P_h D\|_2 \|W_h\|_2`.

    Args:
        network: MLPs as sources.
        count: how many paths.
        length: only paths of this length; None for all.
        beam: prefixes kept after each layer; raise it until ``certified``.
    """
    steps = list(network.steps)
    bounds = _bounds_ahead(steps, length)
    prefixes: list[Path] = [()]
    x = network.entry[None]
    pruned = 0.0
    for position, step in enumerate(steps):
        if step.heads is None:
            x = step.passed(x)
            continue
        x, prefixes = _extended(step, x, prefixes)
        worth = [
            bounds[position + 1][_used(prefix)] if length is not None else bounds[position + 1][0]
            for prefix in prefixes
        ]
        sizes = torch.linalg.vector_norm(x.double().flatten(1), dim=1)
        possible = sizes * torch.tensor(worth, dtype=torch.float64, device=sizes.device)
        alive = [number for number in range(len(prefixes)) if possible[number] > 0]
        order = sorted(alive, key=lambda number: -float(sizes[number]))
        pruned = max([pruned, *(float(possible[number]) for number in order[beam:])])
        kept = order[:beam]
        x, prefixes = x[torch.tensor(kept, dtype=torch.long, device=x.device)], [prefixes[number] for number in kept]
    sizes = torch.linalg.vector_norm(x.double().flatten(1), dim=1)
    order = sizes.argsort(descending=True)[:count].tolist()
    norms = tuple(float(sizes[number]) for number in order)
    certified = pruned == 0 or (len(norms) == count and norms[-1] >= pruned)
    return TopPaths(tuple(prefixes[number] for number in order), norms, pruned, certified)


def _used(prefix: Path) -> int:
    return sum(head is not None for head in prefix)


def _extended(step: FrozenStep, x: Tensor, prefixes: list[Path]) -> tuple[Tensor, list[Path]]:
    """Every prefix extended by every choice for one more layer."""
    assert step.heads is not None
    parts = [step.passed(x)] if step.skip is not None else []
    names: list[Path] = [(*prefix, None) for prefix in prefixes] if step.skip is not None else []
    for head in range(step.heads.heads):
        parts.append(step.attended(x, head))
        names += [(*prefix, head) for prefix in prefixes]
    return torch.cat(parts), names


def _bounds_ahead(steps: list[FrozenStep], length: int | None) -> list[list[float]]:
    """The largest growth of a norm from each position on; by number of heads already used if a length is given."""
    attention = sum(step.heads is not None for step in steps)
    states = 1 if length is None else attention + 1
    ahead = [[1.0] * states if length is None else [float(used == length) for used in range(states)]]
    for step in reversed(steps):
        after = ahead[0]
        passed = 0.0 if step.skip is None else chain_norm(step.skip)
        if step.heads is None:
            ahead.insert(0, [passed * value for value in after])
            continue
        attended = max(head_norms(step))
        if length is None:
            ahead.insert(0, [max(passed, attended) * after[0]])
        else:
            further = [*after[1:], 0.0]
            ahead.insert(0, [max(passed * a, attended * b) for a, b in zip(after, further, strict=True)])
    return ahead


def chain_norm(chain: Chain) -> float:
    """Largest factor by which a chain can amplify a stream, over the whole batch. Bound."""
    factor = 1.0
    for part in chain.parts:
        factor *= _part_norm(part)
    return factor * _ROUNDING


def _part_norm(part: FrozenNorm | Gain) -> float:
    if isinstance(part, Gain):
        return abs(part.factor) if isinstance(part.factor, float) else float(part.factor.abs().max())
    return float(part.scale.abs().max()) * (1.0 if part.gain is None else float(part.gain.abs().max()))


def head_norms(step: FrozenStep) -> list[float]:
    r"""For each head :math:`\max_b \|P_h\|_2 \|W_{V,h} W_{O,h}\|_2`, with the norms around it. Bound."""
    assert step.heads is not None
    around = chain_norm(step.before) * chain_norm(step.after)
    return [around * mixing * weight * _ROUNDING for mixing, weight in zip(*_two_norms(step.heads), strict=True)]


def _two_norms(heads: FrozenHeads) -> tuple[list[float], list[float]]:
    mixing = torch.linalg.matrix_norm(heads.probs.double(), ord=2).amax(dim=0).tolist()
    width, shared = heads.output.shape[0] // heads.heads, heads.heads // heads.groups
    weights = []
    for head in range(heads.heads):
        group = head // shared
        value = heads.values[:, group * width : (group + 1) * width].double()
        output = heads.output[head * width : (head + 1) * width].double()
        # the nonzero singular values of V O are those of R_V R_O^T, with R the triangular factors of both
        triangle = torch.linalg.qr(value).R @ torch.linalg.qr(output.T).R.T
        weights.append(float(torch.linalg.matrix_norm(triangle, ord=2)))
    return mixing, weights


CITES = (Cite("dong2021attention", "thm. 2.2"),)


@dataclass(frozen=True)
class LengthReading:
    """Medians over paths of one length; each path counts once, with its mean over the sequences of the batch.

    Attributes:
        length: length of the paths.
        residual: relative residual of a path's stream.
        norm: its Frobenius norm relative to the output.
    """

    length: int
    residual: MedianInterval
    norm: MedianInterval


def path_decay(
    network: FrozenNetwork,
    number: int,
    *,
    lengths: Collection[int] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[LengthReading]:
    """Draw ``number`` paths of each length uniformly; the number is fixed in advance. Estimate.

    There is one path of length 0: its interval is unbounded, as is that of any sample too small for the confidence.
    """
    readings = []
    size = torch.linalg.vector_norm(network.out.double(), dim=(-2, -1))
    for length in lengths_of_interest(len(network.attention), lengths):
        streams = sample_paths(network, length, number if length else 1, seed=seed).streams.double()
        paths, batch = streams.shape[:2]
        residuals = relative_residual(Tokens(streams.flatten(0, 1), None)).view(paths, batch).mean(dim=1)
        norms = (torch.linalg.vector_norm(streams, dim=(-2, -1)) / size).mean(dim=1)
        readings.append(
            LengthReading(length, median_interval(residuals, confidence), median_interval(norms, confidence))
        )
    return readings


def decay_orders(readings: Sequence[LengthReading]) -> list[float]:
    r"""Ratio of successive log residuals, :math:`\log r_{k+1} / \log r_k`. Heuristic.

    Near 3 if a layer cubes the residual, as pure attention near collapse does; towards 1 if it multiplies it by a
    factor; below 1 if the residual grows again. NaN if a residual is 0 or 1 and its logarithm is uninformative.
    """
    logs = [math.log(r.residual.estimate) if r.residual.estimate > 0 else math.nan for r in readings]
    return [after / before if before else math.nan for before, after in itertools.pairwise(logs)]
