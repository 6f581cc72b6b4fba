"""Single paths: followed, drawn at random, and summed up with intervals whose sample size was fixed first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from rankscope._errors import InputError
from rankscope.paths.census import census
from rankscope.paths.network import FrozenNetwork, Step

Path = tuple[int | None, ...]
"""One entry per attention layer: the head a path goes through, or None where it passes over the layer."""

Weighting = Literal["uniform", "norm"]


@dataclass(frozen=True, eq=False)
class PathSample:
    """Paths of one length from the embedding.

    Attributes:
        length: how many heads each goes through.
        paths: as drawn, with repeats.
        log_weights: (paths,), minus the log probability of each draw: ``exp(log_weight)`` times a path's stream is an
            unbiased estimate of the sum over all paths of the length.
        streams: (paths, batch, tokens, dim), what each carries to the end.
    """

    length: int
    paths: tuple[Path, ...]
    log_weights: Tensor
    streams: Tensor


@dataclass(frozen=True)
class Interval:
    """A middle value and where the true one lies with at least this confidence."""

    estimate: float
    low: float
    high: float
    confidence: float


def follow(network: FrozenNetwork, paths: Sequence[Path]) -> Tensor:
    """The stream each path carries from the embedding to the end: (paths, batch, tokens, dim). Exact.

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


def _chosen(step: Step, x: Tensor, heads: Sequence[int | None]) -> Tensor:
    out = torch.empty_like(x)
    for head in set(heads):
        rows = torch.tensor([number for number, other in enumerate(heads) if other == head])
        out[rows] = step.passed(x[rows]) if head is None else step.attended(x[rows], head)
    return out


def sample_paths(
    network: FrozenNetwork, length: int, number: int, *, weighting: Weighting = "uniform", seed: int = 0
) -> PathSample:
    """Draw paths of one length.

    ``"uniform"`` draws each with equal probability. ``"norm"`` draws layer by layer, with odds that are the norm of the
    stream after each choice times the number of paths that complete it: paths that carry much are drawn more often,
    and the weights make up for it. Estimate.

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
    """Number of ways to add a given length from a layer on."""
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


def median_interval(values: Tensor, confidence: float = 0.95) -> Interval:
    """The median of a sample and an interval for the true one, from order statistics; no assumption on the law.

    The number of values below the true median is binomial(n, 1/2), whatever their law. Bound (on the confidence).
    """
    ordered = values.double().flatten().sort().values.tolist()
    number = len(ordered)
    tail, cut = 0.0, 0
    while cut < number // 2 and tail + math.comb(number, cut) / 2**number <= (1 - confidence) / 2:
        tail += math.comb(number, cut) / 2**number
        cut += 1
    low, high = (-math.inf, math.inf) if cut == 0 else (ordered[cut - 1], ordered[number - cut])
    return Interval(statistics.median(ordered) if number else math.nan, low, high, confidence)
