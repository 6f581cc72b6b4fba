"""Following one residual stream through one call of a block, by tensor identity."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rankscope._errors import SiteError
from rankscope.models.stream import Stream
from rankscope.stream.operators import MULTIPLICATIONS, NORMS, SAME_VALUES, SLICE


class StreamFrame:
    """The tensor objects that are, at this moment, the residual stream of one block call.

    Only weak references are kept: following a stream must not keep an activation alive.
    """

    def __init__(self, entry: Tensor) -> None:
        self.entry_shape = entry.shape
        self._aliases: dict[int, weakref.ref[Tensor]] = {}
        self._normed: dict[int, weakref.ref[Tensor]] = {}
        self.follow(entry)

    def follow(self, tensor: Tensor) -> None:
        """From now on this object is the stream (as well)."""
        self._aliases[id(tensor)] = weakref.ref(tensor)

    def follow_normed(self, tensor: Tensor) -> None:
        """This object is a norm of the stream: the stream itself in a post-norm block, a branch in a pre-norm one."""
        self._normed[id(tensor)] = weakref.ref(tensor)

    def is_stream(self, candidate: object) -> bool:
        """Whether this very object is the stream, or a norm of it."""
        return self._is_in(self._aliases, candidate) or self._is_in(self._normed, candidate)

    def is_normed(self, candidate: object) -> bool:
        """Whether this very object is a norm of the stream."""
        return self._is_in(self._normed, candidate)

    @staticmethod
    def _is_in(references: Mapping[int, weakref.ref[Tensor]], candidate: object) -> bool:
        reference = references.get(id(candidate))
        return reference is not None and reference() is candidate

    def match(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
        """``(stream, branch)`` if these are the arguments of an add onto the stream."""
        if len(args) != 2 or kwargs:
            return None
        left, right = args
        left_is, right_is = self.is_stream(left), self.is_stream(right)
        if left_is == right_is:
            return None
        stream, branch = (left, right) if left_is else (right, left)
        if not isinstance(branch, Tensor) or branch.shape != stream.shape:
            return None
        return stream, branch

    def pass_on(self, func: Callable[..., Any], args: Sequence[Any], out: Any) -> None:
        """Follow the stream through calls that keep its values, normalise it, or scale it by a gain of the block."""
        if not isinstance(out, Tensor) or not args:
            return
        source = args[0]
        if func in NORMS:
            if self.is_stream(source):
                self.follow_normed(out)
        elif func in SAME_VALUES or (func is SLICE and _only_slices(args[1]) and out.shape == source.shape):
            if self.is_stream(source) and out.numel() == source.numel():
                self.follow(out) if self._is_in(self._aliases, source) else self.follow_normed(out)
        elif func in MULTIPLICATIONS and len(args) == 2:
            left, right = args
            self._follow_scaled(*((left, right) if _is_gain(right) else (right, left)), out)

    def _follow_scaled(self, scaled: object, gain: object, out: Tensor) -> None:
        """Follow the stream through a gain a block puts on its skip.

        On a norm of the stream only a number counts: a parameter there mixes tokens with their neighbours (RWKV).
        """
        if self._is_in(self._aliases, scaled) and _is_gain(gain):
            self.follow(out)
        elif self.is_normed(scaled) and isinstance(gain, (int, float)):
            self.follow_normed(out)


def _only_slices(index: object) -> bool:
    return all(isinstance(part, slice) for part in (index if isinstance(index, tuple) else (index,)))


def _is_gain(factor: object) -> bool:
    """A number or a parameter by which a block scales its skip; never a value computed from the stream."""
    return isinstance(factor, (int, float, nn.Parameter))


def first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The stream among a block's arguments: the first floating tensor with at least two axes."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
            return value
    return None


def stream_in(stream: Stream, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What enters a block: of the tensors shaped like the first, the one in the slot that was declared.

    A block that takes one such tensor takes the stream.
    """
    first = first_tensor(args, kwargs)
    if first is None or stream.slot == 0:
        return first
    if isinstance(stream.slot, str) and isinstance(kwargs.get(stream.slot), Tensor):
        return cast(Tensor, kwargs[stream.slot])
    alike = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.shape == first.shape]
    if stream.slot == "sum":
        return alike[0] + alike[1] if len(alike) > 1 else first
    return alike[stream.slot] if isinstance(stream.slot, int) and stream.slot < len(alike) else first


def output_tensor(output: Any) -> Tensor | None:
    """The stream among a block's outputs: the output itself, or the first tensor inside it."""
    return next(iter(slots_in(output).values()), None)


def stream_out(stream: Stream, output: Any) -> Tensor | None:
    """What leaves a block, read in the slot that was declared; None where there is no such slot."""
    slots = slots_in(output)
    if stream.slot != "sum" or isinstance(output, Tensor):
        return slots.get(str(stream.slot)) if stream.slot else next(iter(slots.values()), None)
    first = next(iter(slots.values()), None)
    alike = [value for value in slots.values() if first is not None and value.shape == first.shape]
    return alike[0] + alike[1] if len(alike) > 1 else None


def slots_in(output: Any) -> dict[str, Tensor]:
    """The floating tensors a block gives back, by number or name."""
    if isinstance(output, Tensor):
        return {"0": output}
    items = _items_of(output)
    return {name: item for name, item in items.items() if isinstance(item, Tensor) and item.is_floating_point()}


def _items_of(output: Any) -> dict[str, Any]:
    if isinstance(output, Mapping):
        return {str(name): item for name, item in output.items()}
    if isinstance(output, (tuple, list)):
        return {str(number): item for number, item in enumerate(output)}
    if is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    return {}


def with_output_tensor(output: Any, new: Tensor) -> Any:
    """The same output with another tensor in the place of the stream."""
    if isinstance(output, Tensor):
        return new
    old = output_tensor(output)
    if isinstance(output, (tuple, list)):
        items = [new if item is old else item for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    raise SiteError(
        f"A {type(output).__name__} came out where a tensor or a tuple with one was expected. "
        "Name the blocks that return one with blocks=."
    )


def tensors_in(values: object, depth: int = 2) -> list[Tensor]:
    """Tensors among call arguments, looking into lists, tuples and dicts."""
    if isinstance(values, torch.Tensor):
        return [values]
    if depth == 0 or not isinstance(values, (tuple, list, Mapping)):
        return []
    items = values.values() if isinstance(values, Mapping) else values
    return [tensor for item in items for tensor in tensors_in(item, depth - 1)]
