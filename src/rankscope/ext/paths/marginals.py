"""Sums of paths through given heads or layers, or avoiding them: the recursion with selected terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
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
            _keep_only(sums, step, at[position])
            closed = True
        elif closed:
            sums.carry(step)
        else:
            sums.step(step)
    return sums.by_length


def without(network: FrozenNetwork, pick: Pick) -> Tensor:
    """The sum of all paths that avoid the pick, by length, including constants. Exact."""
    at = _positions(network, (pick,))
    sums = LengthSums(len(network.attention))
    sums.begin(network.entry)
    for position, step in enumerate(network.steps):
        left_out = step.attended_shifted(sums.by_length, pick.head) if position in at else None
        sums.step(step)
        if left_out is not None:
            sums.sums["embedding"] -= left_out
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


def composition(network: FrozenNetwork, keep: Tensor | None = None) -> Tensor:
    r"""Share of the output that went through each pair of heads: (batch, layers, heads, layers, heads). Exact.

    The share of a sum of paths :math:`S` is :math:`\langle S, X \rangle / \|X\|_F^2`, :math:`X` the output; first head,
    then a later one; zero if the second does not come later. One adjoint pass gives every pair.
    """
    if any(step.tokenwise is not None for step in network.steps):
        raise InputError("Pairs of heads are computed with MLPs as sources; decompose with convention='sources'.")
    adjoints = _adjoints(network, keep)
    attention, steps, x = network.attention, network.steps, network.entry
    heads = max(steps[position].heads.heads for _, position in attention)  # type: ignore[union-attr]
    products = x.new_zeros((x.shape[0], len(attention), heads, len(attention), heads))
    order = {position: number for number, (_, position) in enumerate(attention)}
    for position, step in enumerate(steps):
        # y: all paths through each head of this step, carried on to every later attention step.
        if position in order:
            y = step.attended_each(x)
            for later in range(position + 1, len(steps)):
                if later in order:
                    shares = _shares(steps[later], y, adjoints[later])
                    products[:, order[position], : y.shape[0], order[later], : shares.shape[-1]] = shares
                y = carried(y, steps[later : later + 1])
        x = step.total(x)
    return products


def _shares(step: FrozenStep, y: Tensor, adjoint: Tensor) -> Tensor:
    """The projected contribution of each head of a step for each stream of ``y``: (batch, streams, heads)."""
    assert step.heads is not None
    # <after(P y W_V W_O), adjoint> = <P y W_V, after^T(adjoint) W_O^T>: the output projection is applied once, to the
    # adjoint, instead of to every stream.
    mixed = step.heads.by_head(step.heads.mixed(step.before.linear(y)))
    pulled = step.heads.by_head(step.after.adjoint(adjoint) @ step.heads.output.T)
    return torch.einsum("sbthv,bthv->bsh", mixed, pulled)


def _adjoints(network: FrozenNetwork, keep: Tensor | None) -> list[Tensor]:
    """For each step, the direction whose inner product with the stream after it is the share of the output."""
    out = network.out.to(network.entry.dtype)
    if keep is not None:
        out = out * keep[..., None]
    direction = out / out.square().sum(dim=(-2, -1), keepdim=True)
    adjoints = []
    for step in reversed(network.steps):
        adjoints.append(direction)
        # The step is linear, so its vector-Jacobian product at zero is its adjoint.
        with torch.enable_grad():
            x = torch.zeros_like(direction).requires_grad_()
            (direction,) = torch.autograd.grad(carried(x[None], [step])[0], x, direction)
    return adjoints[::-1]


def _keep_only(sums: LengthSums, step: FrozenStep, pick: Pick) -> None:
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
