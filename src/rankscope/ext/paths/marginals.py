"""Sums of paths through given heads or layers: the recursion with selected terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from rankscope.errors import InputError
from rankscope.ext.paths.lengths import LengthSums
from rankscope.ext.paths.network import FrozenNetwork, FrozenStep


@dataclass(frozen=True)
class Pick:
    """A head of a block's attention, or all of it (``head`` None)."""

    layer: int
    head: int | None = None

    def __str__(self) -> str:
        return f"{self.layer}" if self.head is None else f"{self.layer}.{self.head}"


def through(network: FrozenNetwork, *picks: Pick) -> Tensor:
    r"""The sum of all paths that go through every pick, by length: (lengths, batch, tokens, dim). Exact.

    Those that avoid a pick are the rest: ``length_sums(network).by_length - through(network, pick)``.
    All paths are carried up to the first pick; there only its term :math:`P_h S_{k-1} W_h` is kept, and so on.

    Raises:
        InputError: a layer or head that does not exist, or two picks of one layer.
    """
    at = _positions(network, picks)
    sums = LengthSums(len(network.attention))
    sums.begin(network.entry)
    closed = False
    for position, step in enumerate(network.steps):
        if position in at:
            _restrict_to(sums, step, at[position])
            closed = True
        elif closed:
            sums.carry(step)
        else:
            sums.step(step)
    return sums.by_length


def head_marginals(network: FrozenNetwork) -> Iterator[tuple[int, Tensor]]:
    """For each block with attention: all paths through each of its heads, all lengths together.

    Yields:
        The block's number and (heads, batch, tokens, dim) at the end of the network.
    """
    x, steps = network.entry, network.steps
    layers = {position: layer for layer, position in network.attention}
    for position, step in enumerate(steps):
        if position in layers:
            yield layers[position], carried(step.attended_each(x), steps[position + 1 :])
        x = step.total(x)


def carried(x: Tensor, steps: Sequence[FrozenStep]) -> Tensor:
    """Apply the linear part of some steps to streams (sums, batch, tokens, dim)."""
    for step in steps:
        x = step.passed(x) + step.attended(x) if step.heads is not None else step.passed(x)
    return x


def _restrict_to(sums: LengthSums, step: FrozenStep, pick: Pick) -> None:
    sums.sums = {"embedding": step.attended_shifted(sums.by_length, pick.head)}
    sums.reached += 1


def _positions(network: FrozenNetwork, picks: Sequence[Pick]) -> dict[int, Pick]:
    where = dict(network.attention)
    for pick in picks:
        step = network.steps[where[pick.layer]] if pick.layer in where else None
        heads = step.heads.heads if step is not None and step.heads is not None else 0
        if step is None or (pick.head is not None and not 0 <= pick.head < heads):
            raise InputError(f"{pick}: this network has blocks {sorted(where)} with heads 0 to {heads - 1}.")
    at = {where[pick.layer]: pick for pick in picks}
    if len(at) != len(picks):
        raise InputError(f"{', '.join(map(str, picks))}: a path goes through one head of a layer at most.")
    return at
