"""Runs grafts: calls each one at its places, in order, and follows values through attention."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import UnsupportedOperationError
from rankscope.models.view import Label
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.block_call import ActiveBlock
from rankscope.stream.operators import (
    ADDS,
    DIFFERENCES,
    DIVISIONS,
    MULTI_HEAD,
    MULTIPLICATIONS,
    SAME_VALUES,
    SOFTMAXES,
)
from rankscope.surgery.attention_edits import for_each_head
from rankscope.surgery.graft import ATTENTION_PLACES, Graft, Place, ScoreMap, Spot


def mapped_scores(own: AttentionCall, call: AttentionCall, at: Spot, grafts: Sequence[Graft]) -> AttentionCall:
    """A fused call with the queries, keys and scale of every graft that changes them, in order.

    Args:
        own: the model's own call.
        call: the call after the operations.
        at: the block.
        grafts: in order.
    """
    changing = [graft for graft in grafts if "queries" in graft.touches]
    if not changing:
        return call
    assert own.query is not None
    assert call.query is not None
    assert call.key is not None
    scale = own.query.shape[-1] ** -0.5 if own.scale is None else own.scale
    # A graft may replace the model's own scale; a temperature, which operations put there too, must survive that.
    cooled = 1.0 if call.scale == own.scale else (call.scale or scale) / scale
    scores = ScoreMap(call.query, call.key, scale)
    for graft in changing:
        scores = graft.scores(at, scores)
    return replace(call, query=scores.query, key=scores.key, scale=scores.scale * cooled)


T = torch.Tensor
PRODUCTS: frozenset[Callable[..., Any]] = frozenset({torch.matmul, T.matmul, T.__matmul__, torch.bmm, T.bmm})
READERS: frozenset[Callable[..., Any]] = PRODUCTS | {
    torch.nn.functional.linear, torch.addmm, torch.einsum, torch.nn.functional.conv1d, MULTI_HEAD,
}  # fmt: skip


FACTORS: frozenset[Callable[..., Any]] = MULTIPLICATIONS | DIVISIONS
KEEP_SCALE: frozenset[Callable[..., Any]] = ADDS | DIFFERENCES | SAME_VALUES | {
    T.masked_fill, T.masked_fill_, torch.masked_fill, torch.where, T.where, T.__getitem__, *SOFTMAXES,
}  # fmt: skip
"""What may happen to scores between their scale and the softmax: masks, position biases, casts."""


def spot_of(call: ActiveBlock) -> Spot:
    """The block that is running."""
    return Spot(call.stack.name, call.layer, call.stack.depth)


_FUSED_CAN_BE = (
    "They can be if attention calls scaled_dot_product_attention: load the model with attn_implementation='sdpa', "
    "unless its scores have a soft cap (Gemma 2), which that would leave out."
)
_UNSEEN = "the product of its queries and keys was not seen"


@dataclass
class _FollowedScores:
    """The product of queries and keys in eager attention, followed to its softmax.

    Attributes:
        last: the scores after the latest operation on them.
        has_scale: whether the model's own scale can no longer follow: it has, or something else has been applied.
        doubt: what was met on the way that makes the scores ambiguous.
    """

    last: weakref.ref[Tensor]
    has_scale: bool = False
    doubt: str | None = None


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
        self._scores: _FollowedScores | None = None
        self._doubt: str | None = _UNSEEN

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
        self._probs, self._scores = None, None
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

    def values(self, at: Spot, value: Tensor) -> Tensor:
        """The values as attention reads them, ``batch groups key dim``."""
        for graft in self.at("values"):
            value = graft.values(at, value)
        return value

    def attended(self, at: Spot, out: Tensor, value: Tensor) -> Tensor:
        """The output of attention, ``batch heads query dim``."""
        for graft in self.at("values"):
            out = graft.attended(at, out, for_each_head(value, out.shape[1]))
        return out

    def takes_scores(self, call: ActiveBlock, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Whether this call can be the product of queries and keys of a block's own softmax."""
        if func not in PRODUCTS or len(args) != 2 or call.awaited_attention != "attention" or self._is_probs(args[0]):
            return False
        query, key = args
        if not (isinstance(query, Tensor) and isinstance(key, Tensor) and query.dim() == key.dim() in (3, 4)):
            return False
        batch, tokens = call.batch_and_tokens()
        return query.shape[-2] == tokens and query.shape[0] % batch == 0 and bool(self.at("queries"))

    def scores(self, call: ActiveBlock, func: Callable[..., Any], args: Sequence[Any]) -> Tensor:
        """The product of queries and keys, changed by the grafts and scaled as they say."""
        mapped = ScoreMap(args[0], args[1].mT, scale=math.nan)  # the model's own scale follows, and has to be replaced
        for graft in self.at("queries"):
            mapped = graft.scores(spot_of(call), mapped)
        out: Tensor = func(mapped.query * mapped.scale, mapped.key.mT)
        doubt = None if self._scores is None else "several products were met before it"
        if math.isnan(mapped.scale):
            doubt = "it runs as separate operations, whose scale was not replaced"
        self._scores = _FollowedScores(weakref.ref(out), doubt=doubt)
        return out

    def replaced_scale(self, func: Callable[..., Any], args: Sequence[Any]) -> Tensor | None:
        """The scores themselves if this call is the model's own scale on them, which the grafts have replaced."""
        pending = self._scores
        if pending is None or pending.has_scale or func not in FACTORS or len(args) != 2:
            return None
        scores, factor = pending.last(), args[1]
        if scores is None or scores is not args[0]:
            return None
        if not (isinstance(factor, (int, float)) or (isinstance(factor, Tensor) and factor.dim() == 0)):
            return None
        pending.has_scale = True
        return scores

    def follow_scores(self, func: Callable[..., Any], args: Sequence[Any], out: Any) -> None:
        """Follow the scores through masks and position biases; anything else on them makes their scale ambiguous."""
        scores = self._scores
        if scores is None or not isinstance(out, Tensor) or not any(scores.last() is value for value in args):
            return
        if func not in KEEP_SCALE:
            scores.doubt = scores.doubt or f"its scores pass through {func.__name__.strip('_')} before the softmax"
        scores.last, scores.has_scale = weakref.ref(out), scores.has_scale or func not in SAME_VALUES

    def meet_softmax(self, scores: object) -> None:
        """Note whether the scores of a softmax are the ones that were followed."""
        pending, self._scores = self._scores, None
        is_followed = pending is not None and pending.last() is scores
        self._doubt = pending.doubt if is_followed and pending else _UNSEEN

    def check_queries(self, at: Spot) -> None:
        """Raise if a softmax runs whose queries and keys should have been changed and were not, or not surely.

        Raises:
            UnsupportedOperationError: the message gives the reason.
        """
        doubt, self._doubt = self._doubt, _UNSEEN
        if self.at("queries") and doubt is not None:
            raise UnsupportedOperationError(
                f"The queries and keys of block {at.layer} cannot be changed: {doubt}. {_FUSED_CAN_BE}"
            )

    def owe_values(self, at: Spot) -> None:
        """Note that a softmax returned probabilities, so that their product with the values must follow."""
        if self.at("values"):
            self._owed.add(at)

    def follow_probs(self, probs: Tensor, at: Spot) -> None:
        """Follow the probabilities of a block's own softmax until their product with the values."""
        if self.at("values") or self.at("queries"):
            self._probs = (weakref.ref(probs), at)

    def takes_product(self, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Whether this call is the product of the probabilities and the values, and a graft changes it."""
        return bool(self.at("values")) and func in PRODUCTS and len(args) == 2 and self._is_probs(args[0])

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
        return self.attended(at, mixed, value).reshape(out.shape)

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
                f"cannot be changed there. {_FUSED_CAN_BE}"
            )
