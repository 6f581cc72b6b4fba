"""The hand that carries out grafts: asks each one at its places, in order, and follows values through attention."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope._errors import UnsupportedOperationError
from rankscope.models.view import Label
from rankscope.stream.open_call import OpenCall
from rankscope.stream.operators import MULTI_HEAD, SAME_VALUES
from rankscope.surgery.graft import ATTENTION_PLACES, Attended, Graft, Place, Spot
from rankscope.surgery.graft_attention import for_each_head

T = torch.Tensor
PRODUCTS: frozenset[Callable[..., Any]] = frozenset({torch.matmul, T.matmul, T.__matmul__, torch.bmm, T.bmm})
READERS: frozenset[Callable[..., Any]] = PRODUCTS | {
    torch.nn.functional.linear, torch.addmm, torch.einsum, torch.nn.functional.conv1d, MULTI_HEAD,
}  # fmt: skip


def spot_of(call: OpenCall) -> Spot:
    """The block that is running."""
    return Spot(call.stack.name, call.layer, call.stack.depth)


class GraftHand:
    """Asks the grafts. The list may grow and shrink while the hand is at work.

    Args:
        grafts: in their order.
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
        """Those in place now."""
        return list(self._grafts)

    @property
    def touches_attention(self) -> bool:
        """Whether attention must be read."""
        return any(graft.touches & ATTENTION_PLACES for graft in self._grafts)

    def reset(self) -> None:
        """A pass begins or has ended."""
        self._probs, self.seen, self.attention_input = None, None, None
        self._owed.clear()
        for graft in self._grafts:
            graft.reset()

    def read(self, call: OpenCall, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of a matrix product, with the stream among them as the grafts want it read."""
        return tuple(self._read_one(call, value) if call.is_stream(value) else value for value in args)

    def _read_one(self, call: OpenCall, x: Tensor) -> Tensor:
        for graft in self.at("reads"):
            x = graft.read(spot_of(call), x)
            self._reads += 1
        return x

    def add(self, call: OpenCall, label: Label, stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to what; where a parallel branch joins, the stream already went through the first add."""
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

    def sum(self, call: OpenCall, label: Label, total: Tensor) -> Tensor:
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

    def attended(self, call: OpenCall, at: Spot, out: Tensor, value: Tensor) -> Tensor:
        """What attention gives back, ``batch heads query dim``."""
        given = None if self.attention_input is None else self.attention_input()
        read = None if given is None else call.canonical(given)
        for graft in self.at("values"):
            out = graft.attended(at, Attended(out, for_each_head(value, out.shape[1]), read))
        return out

    def owe_values(self, at: Spot) -> None:
        """A softmax has given probabilities: the product with the values must follow."""
        if self.at("values"):
            self._owed.add(at)

    def follow_probs(self, probs: Tensor, at: Spot) -> None:
        """These are the probabilities of a block's own softmax; their product with the values is to come."""
        if self.at("values"):
            self._probs = (weakref.ref(probs), at)

    def takes_product(self, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Whether this call is the product of the probabilities and the values."""
        return func in PRODUCTS and len(args) == 2 and self._is_probs(args[0])

    def product(self, call: OpenCall, func: Callable[..., Any], args: Sequence[Any]) -> Tensor:
        """The product of probabilities and values, with the values and the result as the grafts want them."""
        assert self._probs is not None
        at, shape = self._probs[1], args[1].shape
        self._probs = None
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
        """Raise if a block attended without its values having been seen.

        Raises:
            UnsupportedOperationError: a graft that changes values would have been passed over in silence.
        """
        if self._owed:
            where = ", ".join(str(spot.layer) for spot in sorted(self._owed, key=lambda spot: spot.layer))
            self._owed.clear()
            raise UnsupportedOperationError(
                f"The product of attention probabilities and values could not be seen in block {where}, so values "
                "cannot be changed there. Load the model with attn_implementation='sdpa', if it has one."
            )
