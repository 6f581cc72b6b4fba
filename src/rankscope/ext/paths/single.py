"""Single paths: follow them, and sample them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from rankscope.errors import InputError
from rankscope.ext.paths.census import census
from rankscope.ext.paths.network import FrozenNetwork, FrozenStep

Path = tuple[int | None, ...]
"""One entry per attention layer: the head that a path goes through, or None if it skips the layer."""


@dataclass(frozen=True, eq=False)
class PathSample:
    """Paths of one length from the embedding.

    Attributes:
        length: number of heads each path goes through.
        paths: as drawn, with repeats.
        streams: (paths, batch, tokens, dim), the stream that each path carries to the end.
    """

    length: int
    paths: tuple[Path, ...]
    streams: Tensor


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


def sample_paths(network: FrozenNetwork, length: int, number: int, *, seed: int = 0) -> PathSample:
    """Draw paths of one length, each with equal probability. Estimate.

    Raises:
        InputError: no path has this length.
    """
    generator = torch.Generator().manual_seed(seed)
    steps = [network.steps[position] for _, position in network.attention]
    heads = [step.heads.heads for step in steps if step.heads is not None]
    skips = [step.skip is not None for step in steps]
    # for each layer, the number of ways to add a given length from there on
    ways = [census(heads[layer:], skips[layer:]).counts for layer in range(len(heads))] + [(1,)]
    if not 0 <= length <= len(heads) or ways[0][length] == 0:
        raise InputError(f"length={length}: no path of this network has it; lengths go from 0 to {len(heads)}.")
    paths = tuple(_draw(heads, skips, length, ways, generator) for _ in range(number))
    return PathSample(length, paths, follow(network, paths))


def _draw(
    heads: Sequence[int],
    skips: Sequence[bool],
    length: int,
    ways: Sequence[Sequence[int]],
    generator: torch.Generator,
) -> Path:
    """One path, layer by layer, with odds given by the number of paths that complete each choice."""
    path: list[int | None] = []
    left = length
    for layer, (number, has_skip) in enumerate(zip(heads, skips, strict=True)):
        rest = ways[layer + 1]
        skipping = rest[left] if has_skip and left < len(rest) else 0
        counts = [skipping] + [rest[left - 1] if left else 0] * number
        odds = [float(Fraction(count, ways[0][length])) for count in counts]
        weights = torch.tensor(odds, dtype=torch.float64)
        picked = int(torch.multinomial(weights / weights.sum(), 1, generator=generator))
        path.append(None if picked == 0 else picked - 1)
        left -= picked > 0
    return tuple(path)
