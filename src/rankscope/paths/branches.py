"""From what was seen at an add to a frozen step: the branch is rebuilt from its heads before it is believed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rankscope._errors import UnsupportedConfigError
from rankscope.models.heads import HeadWeights
from rankscope.paths.maps import IDENTITY, Chain, Gain, NormCall, departure, explain, tolerance
from rankscope.paths.network import FrozenHeads, SeenAttention, Step
from rankscope.stream.sites import SiteRef


def gains_of(ref: SiteRef, stream: Tensor, branch: Tensor, out: Tensor) -> tuple[float, bool]:
    """Gain on the stream, and whether the branch was added: ``out = gain * stream (+ branch)``.

    Surgery rewrites adds; its result is read, so that the frozen network is the one that ran.

    Raises:
        UnsupportedConfigError: the sum is neither.
    """
    if torch.equal(out, branch):
        return 0.0, True
    if torch.equal(out, stream):
        return 1.0, bool(not branch.any())
    if torch.equal(out, stream + branch):
        return 1.0, True
    s, b, y = stream.double().flatten(), branch.double().flatten(), out.double().flatten()
    power = float(s @ s)
    for target, added in ((y - b, True), (y, False)):
        gain = float(s @ target) / power if power > 0 else 0.0
        if departure(gain * s + (y - target), y) <= tolerance(out.dtype):
            return (1.0 if abs(gain - 1.0) <= 8 * torch.finfo(out.dtype).eps else gain), added
    raise UnsupportedConfigError(f"{ref}: the sum is not the branch plus a multiple of the stream.")


def attention_step(
    ref: SiteRef,
    weights: HeadWeights,
    probs: Tensor,
    state: Tensor,
    norms: Sequence[NormCall],
    branch: Tensor,
    skip: Chain | None,
    dtype: torch.dtype,
) -> Step:
    """Attention as a step: which norm it reads through, which maps follow its heads, what its constants add.

    Raises:
        UnsupportedConfigError: the sum over heads is not what the model added.
    """
    heads = FrozenHeads.of(weights, probs, dtype)
    shift = heads.shift(weights)
    nearest = float("inf")
    for read, before in _readings(state, norms, dtype):
        out = heads(read.to(dtype)[None])[0] + shift
        after = explain(out.to(branch.dtype), branch, norms, dtype, exact=False)
        if after is not None:
            constant = _constant(heads, shift, before, after)
            seen = SeenAttention(read, _given(out, branch, after, norms), branch)
            return Step(skip=skip, heads=heads, before=before, after=after, bias=constant, seen=seen)
        nearest = min(nearest, departure(out, branch))
    raise UnsupportedConfigError(
        f"{ref}: the sum over heads departs from what the model adds by {nearest:.1e} of its norm, where "
        f"{tolerance(branch.dtype):.0e} was expected. Something stands between the heads and the stream that the "
        "family description does not tell; this block cannot be decomposed."
    )


def parallel_step(
    ref: SiteRef,
    weights: HeadWeights,
    probs: Tensor,
    state: Tensor,
    norms: Sequence[NormCall],
    branch: Tensor,
    skip: Chain | None,
    dtype: torch.dtype,
    mlp: Tensor | None,
) -> Step:
    """Attention and MLP added at once: the MLP's part, as it was seen, is a source; the rest must be the heads."""
    if mlp is None:
        raise UnsupportedConfigError(f"{ref}: the MLP joins the attention branch in a way that was not seen.")
    rest = (branch.double() - mlp.double()).to(branch.dtype)
    step = attention_step(ref, weights, probs, state, norms, rest, skip, dtype)
    return replace(step, source=mlp.to(dtype), origin="mlp")


def _given(out: Tensor, branch: Tensor, after: Chain, norms: Sequence[NormCall]) -> Tensor | None:
    """What the model's output projection gave: the branch, or what the norm after it took; None where neither shows."""
    if after.is_identity:
        return branch
    for call in norms:
        if call.taken.shape == out.shape and departure(out, call.taken) <= tolerance(branch.dtype):
            return call.taken
    if all(isinstance(part, Gain) and isinstance(part.factor, float) for part in after.parts):
        return branch.double() / after.linear(torch.ones((), dtype=torch.float64))
    return None


def _readings(state: Tensor, norms: Sequence[NormCall], dtype: torch.dtype) -> Iterator[tuple[Tensor, Chain]]:
    """What attention may have read: a norm of the stream, the last first, or the stream itself."""
    for number in reversed(range(len(norms))):
        before = explain(state, norms[number].given, norms[: number + 1], dtype)
        if before is not None and not before.is_identity:
            yield norms[number].given, before
    yield state, IDENTITY


def _constant(heads: FrozenHeads, shift: Tensor, before: Chain, after: Chain) -> Tensor | None:
    """What the branch adds to a stream of zeros; None when that is nothing."""
    entering = before.offset()
    total = shift
    if entering is not None:
        total = total + heads(entering.expand(shift.shape)[None])[0]
    total = after.linear(total)
    leaving = after.offset()
    total = total if leaving is None else total + leaving
    return total if bool(total.any()) else None
