"""Softmax calls of a pass, where they are written, and what becomes of what they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from rankscope.examination import _source
from rankscope.examination._source import SourcePlace
from rankscope.stream.operators import PRODUCTS, SOFTMAXES

_FOLLOWED = 8
"""Tensors that are followed from a softmax at once: the product with the values comes soon after."""


@dataclass(frozen=True)
class SoftmaxCall:
    """One softmax: its axis, the shape of what it returned, and where it is written."""

    axis: int
    shape: tuple[int, ...]
    place: SourcePlace | None


@dataclass(frozen=True)
class _Weighting:
    """A product of values with weights that a softmax made.

    Attributes:
        softmax: the softmax.
        summed: the axis of the weights that the product sums over, from the end.
        axis: distance from one of the sums that the product takes, over the keys.
        other: the same along the axis of the softmax itself.
        cleared: share of the entries that were set to zero after the softmax.
    """

    softmax: SoftmaxCall
    summed: int
    axis: float
    other: float
    cleared: float


_FILLS = (Tensor.masked_fill, torch.masked_fill, Tensor.masked_fill_)


class Softmaxes(torch.overrides.TorchFunctionMode):
    """Notes softmax calls and where they are written, and follows their outputs to the products with values.

    Attributes:
        calls: every softmax.
        again: those whose argument a softmax made.
        corners: queries and keys of attention with ``is_causal`` that has more keys than queries.
        fills: the shape of each mask that is filled in, and where that is written.
        filled_after: the same for masks that are filled into what a softmax made.
        returned: the softmax that made what the model returns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[SoftmaxCall] = []
        self.again: list[SoftmaxCall] = []
        self.corners: list[tuple[int, int, SourcePlace | None]] = []
        self.fills: list[tuple[tuple[int, ...], SourcePlace | None]] = []
        self.filled_after: list[SourcePlace | None] = []
        self.weightings: list[_Weighting] = []
        self.returned: SoftmaxCall | None = None
        self._known: list[tuple[Tensor, Tensor, SoftmaxCall]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with torch._C.DisableTorchFunction():
            # Copies, because a mask may be written into the weights in place.
            known_inputs = [(place, one) for one in self._known for place, t in enumerate(given) if t is one[0]]
        out = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            if func in SOFTMAXES and isinstance(out, Tensor):
                axis = kwargs["dim"] if kwargs and "dim" in kwargs else args[1]
                call = SoftmaxCall(axis % out.ndim, tuple(out.shape), _source.running())
                self.calls.append(call)
                self.again += [call] if known_inputs else []
                self._known.append((out, out.detach().clone(), call))
            elif known_inputs and isinstance(out, Tensor):
                place, (weights, made, call) = known_inputs[0]
                if func in PRODUCTS:
                    if not any(isinstance(one, torch.nn.Parameter) for one in given):  # heads are mixed by parameters
                        self._weigh(func, args, place, weights, made, call)
                elif out.shape == made.shape and out.is_floating_point():
                    self._known.append((out, made, call))
            if func is F.scaled_dot_product_attention and (kwargs or {}).get("is_causal"):
                queries, keys = given[0].shape[-2], given[1].shape[-2]
                self.corners += [(queries, keys, _source.running())] if 1 < queries < keys else []
            if func in _FILLS and len(given) > 1:
                written = _source.running()
                self.fills.append((tuple(given[1].shape), written))
                self.filled_after += [written] if known_inputs else []
            del self._known[:-_FOLLOWED]
        return out

    def ended(self, result: Any) -> None:
        """Look whether a softmax made what the model returned."""
        self.returned = next((call for out, _, call in self._known if out is result), None)
        self._known.clear()

    def _weigh(self, func: Any, args: Any, place: int, weights: Tensor, made: Tensor, call: SoftmaxCall) -> None:
        summed = _summed_axis(func, args, place, weights)
        if summed is None or weights.shape[summed] < 2:
            return
        sums, own = weights.double().sum(summed), weights.double().sum(call.axis)
        cleared = float(((weights == 0) & (made > 0)).double().mean())
        self.weightings.append(
            _Weighting(
                call,
                summed - weights.ndim,
                float((sums - 1).abs().max()),
                float((own - 1).abs().max()),
                cleared,
            )
        )

    def wrong(self) -> list[_Weighting]:
        """Products whose weights sum to one along another axis than the one that is summed over, or were masked."""
        return [one for one in self.weightings if one.axis > 1e-2 and (one.other < 1e-3 or one.cleared > 0)]


def _summed_axis(func: Any, args: Any, place: int, weights: Tensor) -> int | None:
    """The axis of the weights that a product sums over; None if there is not exactly one."""
    if func is not torch.einsum:
        return weights.ndim - 1 if place == 0 else weights.ndim - 2 if weights.ndim > 1 else None
    if not isinstance(args[0], str) or "." in args[0] or "->" not in args[0]:
        return None
    given, _, out = args[0].replace(" ", "").partition("->")
    summed = [at for at, letter in enumerate(given.split(",")[place]) if letter not in out]
    return summed[0] if len(summed) == 1 else None
