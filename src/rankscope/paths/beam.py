"""The paths that carry most, by beam search, with a bound on every path that was dropped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.paths.maps import Chain, FrozenNorm, Gain
from rankscope.paths.network import FrozenHeads, FrozenNetwork, Step
from rankscope.paths.single import Path

_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class TopPaths:
    """The paths with the largest Frobenius norm at the end that a beam search met.

    Attributes:
        paths: the largest first.
        norms: of what each carries, over the whole batch.
        pruned_bound: no path that was dropped on the way carries more than this. Bound; 0 when none was dropped.
        certified: whether every dropped path is below the last one listed, so that these are the true top paths.
    """

    paths: tuple[Path, ...]
    norms: tuple[float, ...]
    pruned_bound: float
    certified: bool


def top_paths(network: FrozenNetwork, count: int, *, length: int | None = None, beam: int = 256) -> TopPaths:
    r"""Search layer by layer, keeping the ``beam`` prefixes with the largest norms.

    A dropped prefix carries at the end at most its norm times the product of the largest gains of the steps left: a
    passed-over step's operator norm, or that of its largest head, :math:`\|P_h D\|_2 \|W_h\|_2`.

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
        possible = sizes * torch.tensor(worth, dtype=torch.float64)
        alive = [number for number in range(len(prefixes)) if possible[number] > 0]
        order = sorted(alive, key=lambda number: -float(sizes[number]))
        pruned = max([pruned, *(float(possible[number]) for number in order[beam:])])
        kept = order[:beam]
        x, prefixes = x[torch.tensor(kept, dtype=torch.long)], [prefixes[number] for number in kept]
    sizes = torch.linalg.vector_norm(x.double().flatten(1), dim=1)
    order = sizes.argsort(descending=True)[:count].tolist()
    norms = tuple(float(sizes[number]) for number in order)
    certified = pruned == 0 or (len(norms) == count and norms[-1] >= pruned)
    return TopPaths(tuple(prefixes[number] for number in order), norms, pruned, certified)


def _used(prefix: Path) -> int:
    return sum(head is not None for head in prefix)


def _extended(step: Step, x: Tensor, prefixes: list[Path]) -> tuple[Tensor, list[Path]]:
    """Every prefix with every choice of one more layer."""
    assert step.heads is not None
    parts = [step.passed(x)] if step.skip is not None else []
    names: list[Path] = [(*prefix, None) for prefix in prefixes] if step.skip is not None else []
    for head in range(step.heads.heads):
        parts.append(step.attended(x, head))
        names += [(*prefix, head) for prefix in prefixes]
    return torch.cat(parts), names


def _bounds_ahead(steps: list[Step], length: int | None) -> list[list[float]]:
    """From each position on, the most a norm can grow; by how many heads were used already when a length is asked."""
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
    """Largest factor by which a chain can stretch a stream, over all of the batch. Bound."""
    factor = 1.0
    for part in chain.parts:
        factor *= _part_norm(part)
    return factor * _ROUNDING


def _part_norm(part: FrozenNorm | Gain) -> float:
    if isinstance(part, Gain):
        return abs(part.factor) if isinstance(part.factor, float) else float(part.factor.abs().max())
    return float(part.scale.abs().max()) * (1.0 if part.gain is None else float(part.gain.abs().max()))


def head_norms(step: Step) -> list[float]:
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
        # the non-zero singular values of V O are those of R_V R_O^T, from the triangular factors of both
        triangle = torch.linalg.qr(value).R @ torch.linalg.qr(output.T).R.T
        weights.append(float(torch.linalg.matrix_norm(triangle, ord=2)))
    return mixing, weights
