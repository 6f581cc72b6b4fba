"""Runs grafts: calls each one at its places, in order, and follows values through attention."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import UnsupportedOperationError
from rankscope.models.view import Label
from rankscope.stream.attention_calls import HIDES, AttentionCall
from rankscope.stream.mode import ActiveBlock, Perform
from rankscope.stream.operators import MULTI_HEAD, SAME_VALUES
from rankscope.surgery.attention_edits import UNIFORM, before_kernel, run_kernel, uniform_on
from rankscope.surgery.graft import ATTENTION_PLACES, Attended, Graft, Mixture, Number, Place, Spot


def score_gain(at: Spot, grafts: Sequence[Graft], seen: Tensor | None, lengths: tuple[int, int]) -> Number:
    """The product of all grafts' factors on the scores; grafts receive the number of keys that each row sees."""
    asked = [graft for graft in grafts if "scores" in graft.touches]
    if not asked:
        return 1.0
    keys = torch.full((1, 1, lengths[0], 1), lengths[1]) if seen is None else seen.sum(dim=-1, keepdim=True)
    product: Number = 1.0
    for graft in asked:
        product = product * graft.score_gain(at, keys)
    return product


def with_gain(call: AttentionCall, gain: Number) -> AttentionCall:
    """A fused call with scores, including a bias, multiplied by ``gain``."""
    if not isinstance(gain, Tensor) and gain == 1.0:
        return call
    assert call.query is not None
    factor = gain.to(call.query) if isinstance(gain, Tensor) else gain
    call = replace(call, query=call.query * factor)
    if call.mask is None or call.mask.dtype == torch.bool:
        return call
    return replace(call, mask=torch.where(call.mask <= HIDES, call.mask, call.mask.clamp(min=HIDES) * factor))


def gained_scores(scores: Tensor, visible: Tensor, gain: Number) -> Tensor:
    """Scores times ``gain`` where a key is visible."""
    if not isinstance(gain, Tensor) and gain == 1.0:
        return scores
    factor = gain.to(scores) if isinstance(gain, Tensor) else gain
    return (scores.masked_fill(~visible, 0.0) * factor).masked_fill(~visible, -torch.inf)


def joint_mixture(at: Spot, grafts: Sequence[Graft]) -> Mixture | None:
    """The mixtures of all grafts combined; None if no graft mixes."""
    mixtures = [graft.mixture(at) for graft in grafts if "probs" in graft.touches]
    return reduce(lambda earlier, later: later.after(earlier), mixtures) if mixtures else None


def mixed_probs(probs: Tensor, seen: Tensor | None, mixture: Mixture) -> Tensor:
    """The mixture applied to probabilities ``batch heads query key``."""
    mixed = mixture.own * probs
    if _counts(mixture.uniform):
        mixed = mixed + mixture.uniform * uniform_on(seen, probs)
    if _counts(mixture.identity):
        _check_square(probs.shape[-2], probs.shape[-1])
        mixed = mixed + mixture.identity * torch.eye(probs.shape[-1], dtype=probs.dtype, device=probs.device)
    return mixed


def mixed_output(
    out: Tensor, call: AttentionCall, mixture: Mixture, own: Mapping[str, Any], perform: Perform
) -> Tensor:
    """The mixture applied to the output of a fused kernel with arguments ``own``. Dropout affects only P, not I, U."""
    mixed = mixture.own * out
    if _counts(mixture.uniform):
        flat = before_kernel(replace(call, edits=()), call.lengths[0], [UNIFORM])
        mixed = mixed + mixture.uniform * run_kernel(flat, {**own, "dropout_p": 0.0}, perform)
    if _counts(mixture.identity):
        _check_square(*call.lengths)
        assert call.value is not None
        mixed = mixed + mixture.identity * for_each_head(call.value, out.shape[1])
    return mixed


def for_each_head(value: Tensor, heads: int) -> Tensor:
    """Values with one entry per query head, if several heads share a group."""
    return value if value.shape[1] == heads else value.repeat_interleave(heads // value.shape[1], dim=1)


def _counts(number: Number) -> bool:
    return isinstance(number, Tensor) or number != 0.0


def _check_square(queries: int, keys: int) -> None:
    if queries != keys:
        raise UnsupportedOperationError(
            f"An identity in attention pairs each token with itself, and here are {queries} queries and {keys} keys. "
            "Run whole sequences, without cached keys, prefixes or pooled keys."
        )


T = torch.Tensor
PRODUCTS: frozenset[Callable[..., Any]] = frozenset({torch.matmul, T.matmul, T.__matmul__, torch.bmm, T.bmm})
READERS: frozenset[Callable[..., Any]] = PRODUCTS | {
    torch.nn.functional.linear, torch.addmm, torch.einsum, torch.nn.functional.conv1d, MULTI_HEAD,
}  # fmt: skip


def spot_of(call: ActiveBlock) -> Spot:
    """The block that is running."""
    return Spot(call.stack.name, call.layer, call.stack.depth)


class GraftDispatcher:
    """Calls the grafts. The list may grow and shrink while the dispatcher is active.

    Args:
        grafts: in order.
    """

    def __init__(self, grafts: Sequence[Graft]) -> None:
        self._grafts = grafts
        self._probs: tuple[weakref.ref[Tensor], Spot] | None = None
        self._owed: set[Spot] = set()
        self._reads = 0
        self.seen: Tensor | None = None
        self.attention_input: weakref.ref[Tensor] | None = None

    def at(self, place: Place) -> list[Graft]:
        """The grafts that touch a place."""
        return [graft for graft in self._grafts if place in graft.touches]

    @property
    def grafts(self) -> list[Graft]:
        """The active grafts."""
        return list(self._grafts)

    @property
    def touches_attention(self) -> bool:
        """Whether attention has to be followed."""
        return any(graft.touches & ATTENTION_PLACES for graft in self._grafts)

    def reset(self) -> None:
        """Reset all grafts; called when a pass begins or has ended."""
        self._probs, self.seen, self.attention_input = None, None, None
        self._owed.clear()
        for graft in self._grafts:
            graft.reset()

    def read(self, call: ActiveBlock, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of a matrix product, with the stream replaced by what the grafts return for it."""
        return tuple(self._read_one(call, value) if call.is_stream(value) else value for value in args)

    def _read_one(self, call: ActiveBlock, x: Tensor) -> Tensor:
        for graft in self.at("reads"):
            x = graft.read(spot_of(call), x)
            self._reads += 1
        return x

    def add(self, call: ActiveBlock, label: Label, stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """The stream and the branch to add; a joining parallel branch finds the stream already past the first add."""
        if self.at("reads") and not self._reads:
            raise UnsupportedOperationError(
                f"Block {call.layer}: the matrix product by which its {label} branch reads the stream was not seen, so "
                "what it reads cannot be changed."
            )
        self._reads = 0
        for graft in self.at("adds"):
            own, branch = graft.add(spot_of(call), label, stream, branch)
            stream = stream if call.joins else own
        return stream, branch

    def sum(self, call: ActiveBlock, label: Label, total: Tensor) -> Tensor:
        """The stream after an add."""
        for graft in self.at("sums"):
            new = graft.sum(spot_of(call), label, call.canonical(total), self.seen)
            total = call.native(new, total)
        return total

    def values(self, at: Spot, value: Tensor) -> Tensor:
        """The values as attention reads them, ``batch groups key dim``."""
        for graft in self.at("values"):
            value = graft.values(at, value)
        return value

    def attended(self, call: ActiveBlock, at: Spot, out: Tensor, value: Tensor) -> Tensor:
        """The output of attention, ``batch heads query dim``."""
        given = None if self.attention_input is None else self.attention_input()
        read = None if given is None else call.canonical(given)
        for graft in self.at("values"):
            out = graft.attended(at, Attended(out, for_each_head(value, out.shape[1]), read))
        return out

    def owe_values(self, at: Spot) -> None:
        """Note that a softmax returned probabilities, so that their product with the values must follow."""
        if self.at("values"):
            self._owed.add(at)

    def follow_probs(self, probs: Tensor, at: Spot) -> None:
        """Follow the probabilities of a block's own softmax until their product with the values."""
        if self.at("values"):
            self._probs = (weakref.ref(probs), at)

    def takes_product(self, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Whether this call is the product of the probabilities and the values."""
        return func in PRODUCTS and len(args) == 2 and self._is_probs(args[0])

    def product(self, call: ActiveBlock, func: Callable[..., Any], args: Sequence[Any]) -> Tensor:
        """The product of probabilities and values, with values and result changed by the grafts."""
        assert self._probs is not None
        at, shape = self._probs[1], args[1].shape
        self._probs = None
        # Some models keep batch and heads in one axis; grafts always see ``batch heads tokens dim``.
        batch = call.batch_and_tokens()[0]
        split = args[1] if args[1].dim() == 4 else args[1].reshape(batch, -1, *shape[-2:])
        value = self.values(at, split)
        out = func(args[0], value.reshape(shape))
        mixed = out if out.dim() == 4 else out.reshape(batch, -1, *out.shape[-2:])
        self._owed.discard(at)
        return self.attended(call, at, mixed, value).reshape(out.shape)

    def pass_on(self, func: Callable[..., Any], args: Sequence[Any], out: Any) -> None:
        """Follow the probabilities through casts and dropout."""
        if func in SAME_VALUES and args and self._is_probs(args[0]) and isinstance(out, Tensor):
            assert self._probs is not None
            self._probs = (weakref.ref(out), self._probs[1])

    def _is_probs(self, candidate: object) -> bool:
        return self._probs is not None and self._probs[0]() is candidate

    def check_values(self) -> None:
        """Raise if attention ran in a block but its values were not seen.

        Raises:
            UnsupportedOperationError: a graft that changes values would have been skipped silently.
        """
        if self._owed:
            where = ", ".join(str(spot.layer) for spot in sorted(self._owed, key=lambda spot: spot.layer))
            self._owed.clear()
            raise UnsupportedOperationError(
                f"The product of attention probabilities and values could not be seen in block {where}, so values "
                "cannot be changed there. Load the model with attn_implementation='sdpa', if it has one."
            )
