"""Grafts in attention that is written out: a product of queries and keys, a softmax, a product with the values.

A fused kernel takes queries, keys and values as its arguments. Written out, they are met one after the other, and
between them lie a scale, masks, position biases, casts and dropout. So scores are followed from their product to the
softmax, and probabilities from the softmax to their product with the values, by tensor identity.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import UnsupportedOperationError
from rankscope.stream.block_call import ActiveBlock
from rankscope.stream.operators import ADDS, DIFFERENCES, DIVISIONS, MULTIPLICATIONS, SAME_VALUES, SOFTMAXES
from rankscope.surgery.attention_edits import for_each_head
from rankscope.surgery.graft import Graft, Place, ScoreMap, Spot, at_place

T = torch.Tensor
PRODUCTS: frozenset[Callable[..., Any]] = frozenset({torch.matmul, T.matmul, T.__matmul__, torch.bmm, T.bmm})
FACTORS: frozenset[Callable[..., Any]] = MULTIPLICATIONS | DIVISIONS
KEEP_SCALE: frozenset[Callable[..., Any]] = ADDS | DIFFERENCES | SAME_VALUES | {
    T.masked_fill, T.masked_fill_, torch.masked_fill, torch.where, T.where, T.__getitem__, *SOFTMAXES,
}  # fmt: skip
"""What may happen to scores between their scale and the softmax: masks, position biases, casts."""

_FUSED_CAN_BE = (
    "They can be if attention calls scaled_dot_product_attention: load the model with attn_implementation='sdpa', "
    "unless its scores have a soft cap (Gemma 2), which that would leave out."
)
_UNSEEN = "the product of its queries and keys was not seen"


def spot_of(call: ActiveBlock) -> Spot:
    """The block that is running."""
    return Spot(call.stack.name, call.layer, call.stack.depth)


@dataclass
class _FollowedScores:
    """The product of queries and keys, followed to its softmax.

    Attributes:
        last: the scores after the latest operation on them.
        has_scale: whether the model's own scale can no longer follow: it has, or something else has been applied.
        doubt: what was met on the way that makes the scores ambiguous.
    """

    last: weakref.ref[Tensor]
    has_scale: bool = False
    doubt: str | None = None


class EagerAttention:
    """Puts grafts on queries, keys and values into attention that is written out.

    Args:
        grafts: in order; the list may grow and shrink.
    """

    def __init__(self, grafts: Sequence[Graft]) -> None:
        self._grafts = grafts
        self._probs: tuple[weakref.ref[Tensor], Spot] | None = None
        self._owed: set[Spot] = set()
        self._scores: _FollowedScores | None = None
        self._doubt: str | None = _UNSEEN
        self._softmax_at: Spot | None = None

    def reset(self) -> None:
        """A pass begins or has ended."""
        self._probs = self._scores = None
        self._owed.clear()

    def _at(self, place: Place) -> list[Graft]:
        return at_place(self._grafts, place)

    def run(self, call: ActiveBlock, func: Callable[..., Any], args: Sequence[Any], perform: Callable[[], Any]) -> Any:
        """Run one operation of a block with the grafts in it; ``perform()`` runs it as it is."""
        if self._is_product_of_values(func, args):
            return self._product_of_values(call, func, args)
        if self._is_product_of_queries(call, func, args):
            return self._product_of_queries(call, func, args)
        scores = self._replaced_scale(func, args)
        if scores is not None:
            return scores
        is_softmax = func in SOFTMAXES and bool(args)
        if is_softmax:  # are its scores those that were followed?
            pending, self._scores = self._scores, None
            is_followed = pending is not None and pending.last() is args[0]
            self._doubt = pending.doubt if is_followed and pending else _UNSEEN
        out = perform()
        if is_softmax and self._softmax_at is not None:
            self._probs = (weakref.ref(out), self._softmax_at)
            self._softmax_at = None
        elif func in SAME_VALUES and args and isinstance(out, Tensor) and self._is_probs(args[0]):
            assert self._probs is not None  # casts and dropout
            self._probs = (weakref.ref(out), self._probs[1])
        self._follow_scores(func, args, out)
        return out

    def before_softmax(self, at: Spot) -> None:
        """The softmax of a block is about to run: its scores must have been seen, and its values must follow.

        Raises:
            UnsupportedOperationError: queries and keys should have been changed and were not, or not surely.
        """
        doubt, self._doubt = self._doubt, _UNSEEN
        if self._at("queries") and doubt is not None:
            raise UnsupportedOperationError(
                f"The queries and keys of block {at.layer} cannot be changed: {doubt}. {_FUSED_CAN_BE}"
            )
        if self._at("values"):
            self._owed.add(at)
        if self._at("values") or self._at("queries"):
            self._softmax_at = at

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

    # Queries and keys.

    def _is_product_of_queries(self, call: ActiveBlock, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Whether this call can be the product of queries and keys of a block's own softmax."""
        if func not in PRODUCTS or len(args) != 2 or call.awaited_attention != "attention" or self._is_probs(args[0]):
            return False
        query, key = args
        if not (isinstance(query, Tensor) and isinstance(key, Tensor) and query.dim() == key.dim() in (3, 4)):
            return False
        batch, tokens = call.batch_and_tokens()
        return query.shape[-2] == tokens and query.shape[0] % batch == 0 and bool(self._at("queries"))

    def _product_of_queries(self, call: ActiveBlock, func: Callable[..., Any], args: Sequence[Any]) -> Tensor:
        mapped = ScoreMap(args[0], args[1].mT, scale=math.nan)  # the model's own scale follows, and has to be replaced
        for graft in self._at("queries"):
            mapped = graft.scores(spot_of(call), mapped)
        out: Tensor = func(mapped.query * mapped.scale, mapped.key.mT)
        doubt = None if self._scores is None else "several products were met before it"
        if math.isnan(mapped.scale):
            doubt = "it runs as separate operations, whose scale was not replaced"
        self._scores = _FollowedScores(weakref.ref(out), doubt=doubt)
        return out

    def _replaced_scale(self, func: Callable[..., Any], args: Sequence[Any]) -> Tensor | None:
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

    def _follow_scores(self, func: Callable[..., Any], args: Sequence[Any], out: Any) -> None:
        """Follow the scores through masks and position biases; anything else on them makes their scale ambiguous."""
        scores = self._scores
        if scores is None or not isinstance(out, Tensor) or not any(scores.last() is value for value in args):
            return
        if func not in KEEP_SCALE:
            scores.doubt = scores.doubt or f"its scores pass through {func.__name__.strip('_')} before the softmax"
        scores.last, scores.has_scale = weakref.ref(out), scores.has_scale or func not in SAME_VALUES

    # Values.

    def _is_probs(self, candidate: object) -> bool:
        return self._probs is not None and self._probs[0]() is candidate

    def _is_product_of_values(self, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        return func in PRODUCTS and len(args) == 2 and self._is_probs(args[0]) and bool(self._at("values"))

    def _product_of_values(self, call: ActiveBlock, func: Callable[..., Any], args: Sequence[Any]) -> Tensor:
        assert self._probs is not None
        at, shape = self._probs[1], args[1].shape
        self._probs = None
        # Some models keep batch and heads in one axis; grafts always see ``batch heads tokens dim``.
        batch = call.batch_and_tokens()[0]
        split = args[1] if args[1].dim() == 4 else args[1].reshape(batch, -1, *shape[-2:])
        value = given_values(self._grafts, at, split)
        out = func(args[0], value.reshape(shape))
        mixed = out if out.dim() == 4 else out.reshape(batch, -1, *out.shape[-2:])
        self._owed.discard(at)
        return attended(self._grafts, at, mixed, value).reshape(out.shape)


def given_values(grafts: Sequence[Graft], at: Spot, value: Tensor) -> Tensor:
    """The values as attention reads them, ``batch groups key dim``."""
    for graft in at_place(grafts, "values"):
        value = graft.values(at, value)
    return value


def attended(grafts: Sequence[Graft], at: Spot, out: Tensor, value: Tensor) -> Tensor:
    """The output of attention, ``batch heads query dim``."""
    for graft in at_place(grafts, "values"):
        out = graft.attended(at, out, for_each_head(value, out.shape[1]))
    return out
