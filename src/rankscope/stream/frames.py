"""Follows one residual stream through one call of a block, by tensor identity.

The tensor object itself is the key, not its values: code that adds a branch to the stream passes exactly the object
that earlier code produced, so ``is`` finds the skip without comparing numbers and without false matches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankscope.errors import SiteError
from rankscope.models.stream import Stream
from rankscope.models.view import Sums
from rankscope.pass_graph.identity import ByTensor
from rankscope.stream.operators import (
    ADDED_MATRIX_PRODUCTS,
    ADDED_PRODUCTS,
    ADDS,
    CHOICES,
    CONCATENATIONS,
    DIFFERENCES,
    DIVISIONS,
    INDEXED_SUMS,
    INTERPOLATIONS,
    JOINS,
    LIMITS,
    MULTIPLICATIONS,
    NEGATIONS,
    NORMS,
    PRODUCTS,
    REDUCTIONS,
    SAME_VALUES,
    SLICE,
    SUMS,
)


@dataclass(frozen=True)
class Summand:
    """One of the two summands of a call: its factors, and how to compute it.

    A matrix product (``is_product``) does not carry its factors.
    """

    factors: tuple[object, ...]
    value: Callable[[], Any]
    is_product: bool = False


@dataclass(frozen=True)
class SkipSum:
    """A call that adds a branch to the stream.

    Attributes:
        carried: the tensor that is the stream.
        branches: the tensors from which the branch is formed.
        own: the summand that contains the stream, including its gain.
        other: the branch.
        join: puts the two side by side, the stream first, if the call does not add them; None for a sum.
    """

    carried: Tensor
    branches: tuple[Tensor, ...]
    own: Summand
    other: Summand
    join: Callable[[Tensor, Tensor], Tensor] | None = None

    def summands(self) -> tuple[Tensor, Tensor]:
        """Stream and branch as they are added."""
        stream, branch = self.own.value(), self.other.value()
        return stream, branch if branch.shape == stream.shape else branch.expand(stream.shape)

    def of(self, stream: Tensor | None, branch: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The same call with another stream and branch, at most one of them left out; ``dtype`` is that of the sum.

        What is left out is not multiplied by zero, which would turn an infinite entry into NaN. The result is a new
        tensor, because the model may write to it in place.
        """
        if self.join is not None:
            present = stream if stream is not None else branch
            assert present is not None
            zeros = torch.zeros_like(present)
            return self.join(zeros if stream is None else stream, zeros if branch is None else branch)
        if stream is None or branch is None:
            present = stream if stream is not None else branch
            assert present is not None
            return present.to(dtype, copy=True)  # under autocast, a branch has less precision than the stream
        return stream + branch


class StreamFrame:
    """The tensor objects that are, at this moment, the residual stream of one block call.

    Only weak references are kept: following a stream must not keep an activation alive.
    """

    def __init__(self, entry: Tensor, sums: Sums = "plain") -> None:
        self.entry_shape = entry.shape
        self.sums = {"plain": ADDS, "any": SUMS, "joined": SUMS | JOINS}[sums]
        self._any_form = sums != "plain"
        self._aliases = ByTensor[None]()
        self._normed = ByTensor[None]()
        self._joined: tuple[weakref.ref[Tensor], int | None, torch.Size] | None = None
        self.follow(entry)

    def follow(self, tensor: Tensor) -> None:
        """From now on this object is (also) the stream."""
        self._aliases[tensor] = None

    def follow_normed(self, tensor: Tensor) -> None:
        """This object is a norm of the stream: the stream itself in a post-norm block, a branch in a pre-norm one."""
        self._normed[tensor] = None
        self._aliases.drop(tensor)

    def is_stream(self, candidate: object) -> bool:
        """Whether this exact object is the stream, or a norm of it."""
        return candidate in self._aliases or candidate in self._normed

    def is_normed(self, candidate: object) -> bool:
        """Whether this exact object is a norm of the stream."""
        return candidate in self._normed

    def match(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> SkipSum | None:
        """The sum, if this call to one of ``sums`` adds something to the stream."""
        if not kwargs and func not in JOINS and not any(map(self.is_stream, args)):
            return None  # most sums of a model: analysing them would cost more than the sum itself
        terms = summands_of(func, args, kwargs)
        if terms is None:
            return None
        holds = [
            next((factor for factor in term.factors if not term.is_product and self.is_stream(factor)), None)
            for term in terms
        ]
        # Neither summand is the stream, or both are (x + x, x + norm(x)): not a skip.
        if (holds[0] is None) == (holds[1] is None):
            return None
        at = 0 if holds[0] is not None else 1
        carried = holds[at]
        assert isinstance(carried, Tensor)
        branches = tuple(factor for factor in terms[1 - at].factors if isinstance(factor, Tensor))
        if not branches or not self._has_the_shape(func, carried, branches):
            return None
        return SkipSum(carried, branches, terms[at], terms[1 - at], _join(func, args, kwargs, stream_first=at == 0))

    def follow_joined(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor
    ) -> None:
        """This object holds the stream beside its branch; the call that makes one stream of both is still to come."""
        parts = args[0] if args else kwargs["tensors"]
        axis = None if func in CONCATENATIONS else (_axis(args, kwargs) or 0) % out.dim()
        self._joined = weakref.ref(out), axis, parts[0].shape

    def makes_one_stream(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> bool:
        """Whether this call reads the stream and its branch side by side and returns one stream of both.

        From then on nothing else is the stream: a model that uses the older one again (a gated recurrent unit, whose
        gates read both) has a second way around the branch, and must not pass for one that has not.
        """
        if self._joined is None or not isinstance(out, Tensor):
            return False
        reference, axis, shape = self._joined
        joined = reference()
        if joined is None or out.shape != shape or not any(value is joined for value in args):
            return False
        # Concatenated channels become one stream by a matrix; stacked tensors by a sum, a mean or weights.
        if axis is None:
            made = func is torch.nn.functional.linear or (func in PRODUCTS and args[0] is joined)
        elif func in REDUCTIONS:
            over = _axis(args, kwargs)
            made = args[0] is joined and over is not None and over % joined.dim() == axis
        else:
            made = func is torch.einsum and _weighs_the_first(args, joined, axis)
        if made:
            self._joined = None
            self.supersede(out)
        return made

    def supersede(self, tensor: Tensor) -> None:
        """From now on this object alone is the stream."""
        self._aliases.clear()
        self._normed.clear()
        self.follow(tensor)

    def _has_the_shape(self, func: Callable[..., Any], carried: Tensor, branches: Sequence[Tensor]) -> bool:
        """Whether the sum has the shape of the stream."""
        shape = carried.shape
        if func in ADDED_MATRIX_PRODUCTS:
            return (*branches[0].shape[:-1], branches[1].shape[-1]) == tuple(shape)
        if all(branch.shape == shape for branch in branches):
            return True
        return (
            self._any_form
            and all(_broadcasts(branch.shape, shape) for branch in branches)
            and not (_is_statistic(branches, shape))
        )

    def pass_on(self, func: Callable[..., Any], args: Sequence[Any], out: Any) -> None:
        """Follow the stream through calls that keep its values, normalise it, or scale it by a gain."""
        if not isinstance(out, Tensor) or not args:
            return
        source = args[0]
        # A norm of the stream may be the stream (post-norm) or a branch (pre-norm); which one shows at the next add.
        if func in NORMS:
            if self.is_stream(source):
                self.follow_normed(out)
        elif func in SAME_VALUES or (func is SLICE and _only_slices(args[1]) and out.shape == source.shape):
            if self.is_stream(source) and out.numel() == source.numel():
                self.follow(out) if source in self._aliases else self.follow_normed(out)
        elif func in LIMITS:
            if self.is_stream(source) and _changes_nothing(source, out):
                self.follow(out) if source in self._aliases else self.follow_normed(out)
        # Plain: only numbers and parameters are gains. Any form: so is a tensor computed from the stream (a gate).
        elif func in MULTIPLICATIONS and len(args) == 2:
            left, right = args
            if self._any_form and self.is_stream(left) != self.is_stream(right):
                self._follow_gated(left if self.is_stream(left) else right, out)
            else:
                self._follow_scaled(*((left, right) if _is_gain(right) else (right, left)), out)
        elif self._any_form and func in DIFFERENCES and len(args) == 2 and isinstance(args[1], Tensor):
            if _is_statistic(args[1:], out.shape):  # x - x.mean(-1): the stream, centred
                self._follow_gated(source, out)
        elif self._any_form and (func in DIVISIONS or func in NEGATIONS or _adds_nothing(func, args)):
            self._follow_gated(source, out)
        elif self._any_form and func in ADDS and len(args) == 2 and all(arg in self._aliases for arg in args):
            self.follow(out)  # a x + b x: a gain, in two terms

    def _follow_gated(self, gated: object, out: Tensor) -> None:
        """Follow the stream through any gain, including computed ones."""
        if self.is_stream(gated) and isinstance(gated, Tensor) and out.shape == gated.shape:
            self.follow_normed(out) if self.is_normed(gated) else self.follow(out)

    def _follow_scaled(self, scaled: object, gain: object, out: Tensor) -> None:
        """Follow the stream through a gain that a block applies to its skip.

        On a norm of the stream only a number counts as a gain: a parameter there mixes neighbouring tokens (RWKV).
        """
        if scaled in self._aliases and _is_gain(gain):
            self.follow(out)
        elif self.is_normed(scaled) and isinstance(gain, (int, float)):
            self.follow_normed(out)


def summands_of(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Summand, Summand] | None:
    """The two summands of a call; None for forms that are not recognised."""
    if func in JOINS:
        return _parts(func, args, kwargs)
    named = dict(kwargs)
    factors = (*args, *(named.pop(name) for name in _ARGUMENTS if name in named))
    named.pop("out", None)
    if (func in ADDS or func in DIFFERENCES) and len(factors) == 2 and named.keys() <= {"alpha"}:
        left, right = factors
        factor = named.get("alpha", 1) * (-1 if func in DIFFERENCES else 1)
        return Summand((left,), lambda: left), Summand((right,), lambda: right if factor == 1 else right * factor)
    # Tokens that were routed to a branch, added back at their places: the branch is zero at all others.
    if func in INDEXED_SUMS and len(factors) == 4 and not named:
        own, dim, index, source = factors
        return Summand((own,), lambda: own), Summand(
            (source,), lambda: torch.zeros_like(own).index_add(dim, index, source)
        )
    if len(factors) != 3:
        return None
    first, second, third = factors
    # where(c, x, y) = c x + (1 - c) y; as a method it is x.where(c, y).
    if func in CHOICES and not named:
        chosen, left = (second, first) if func is Tensor.where else (first, second)
        return Summand((left,), lambda: torch.where(chosen, left, 0.0)), Summand(
            (third,), lambda: torch.where(chosen, 0.0, third)
        )
    if func in ADDED_PRODUCTS and named.keys() <= {"value"}:
        value = named.get("value", 1)
        return Summand((first,), lambda: first), Summand((second, third), lambda: value * second * third)
    # lerp(x, y, t) = (1 - t) x + t y.
    if func in INTERPOLATIONS and not named:
        return Summand((first,), lambda: first - third * first), Summand((second,), lambda: third * second)
    if func in ADDED_MATRIX_PRODUCTS and named.keys() <= {"alpha", "beta"}:
        beta, alpha = named.get("beta", 1), named.get("alpha", 1)
        return Summand((first,), lambda: beta * first), Summand(
            (second, third), lambda: alpha * (second @ third), is_product=True
        )
    return None


def _parts(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Summand, Summand] | None:
    """The two tensors that a call puts side by side; None if it joins others, or tokens instead of channels."""
    parts = args[0] if args else kwargs.get("tensors")
    if not isinstance(parts, (tuple, list)) or len(parts) != 2 or kwargs.keys() - {"tensors", "dim"}:
        return None
    left, right = parts
    if func in CONCATENATIONS and (_axis(args, kwargs) or 0) % left.dim() != left.dim() - 1:
        return None
    return Summand((left,), lambda: left), Summand((right,), lambda: right)


def _join(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, stream_first: bool
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """What puts a stream and a branch side by side as this call does, or None for a sum."""
    if func not in JOINS:
        return None
    axis = _axis(args, kwargs) or 0
    return lambda stream, branch: func((stream, branch) if stream_first else (branch, stream), axis)


def _axis(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The one axis that a call names; None if it names none, or several."""
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    axis = axis[0] if isinstance(axis, (tuple, list)) and len(axis) == 1 else axis
    return axis if isinstance(axis, int) else None


def _weighs_the_first(args: Sequence[Any], joined: Tensor, axis: int) -> bool:
    """``einsum("s,sbtd->btd", w, joined)``: a sum over the joined tensors with one weight for each."""
    if len(args) != 3 or not isinstance(args[0], str) or axis != 0:
        return False
    given, arrow, kept = args[0].replace(" ", "").partition("->")
    words = given.split(",")
    if not arrow or len(words) != 2:
        return False
    at = 1 if args[2] is joined else 0
    return words[1 - at] == words[at][:1] and words[at][1:] == kept


_ARGUMENTS = ("input", "other", "end", "tensor1", "tensor2", "weight", "mat1", "mat2", "batch1", "batch2")
"""Keywords of the sums, in the order of their positions; those of ``where`` and ``index_add`` are never given so."""


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    if len(shape) > len(to):
        return False
    return all(length in (1, wanted) for length, wanted in zip(shape[::-1], to[::-1], strict=False))


def _is_statistic(branches: Sequence[Tensor], shape: torch.Size) -> bool:
    """Whether each branch is one number per token."""
    return shape[-1] > 1 and all(branch.dim() == len(shape) and branch.shape[-1] == 1 for branch in branches)


def _adds_nothing(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """``0 + x``, as ``sum([x, y])`` begins."""
    return func in ADDS and len(args) == 2 and isinstance(args[1], (int, float)) and args[1] == 0


def _changes_nothing(before: Tensor, after: Tensor) -> bool:
    """Whether a limit was not reached, so that two tensors have the same values; True where there are none to see."""
    if torch._C._functorch.is_functorch_wrapped_tensor(after):
        return False
    with torch._C.DisableTorchFunction():
        return after.is_meta or torch.equal(before, after)


def _only_slices(index: object) -> bool:
    return all(isinstance(part, slice) for part in (index if isinstance(index, tuple) else (index,)))


def _is_gain(factor: object) -> bool:
    """Whether this is a number or a parameter, and not a value computed from the stream."""
    return isinstance(factor, (int, float, nn.Parameter))


def first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The stream among a block's arguments: the first floating tensor with at least two axes.

    If there is none, as in blocks that take one tuple, list or dict, it is the first in there with three axes, or two.
    """
    for value in (*args, *kwargs.values()):
        if _may_be_stream(value, 2):
            return cast(Tensor, value)
    inside = [value for value in tensors_in((*args, *kwargs.values()), depth=3) if _may_be_stream(value, 2)]
    return next((value for value in inside if value.dim() >= 3), inside[0] if inside else None)


def _may_be_stream(value: object, axes: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= axes


def by_place(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """The arguments of a call by position or name."""
    return dict[int | str, Any](enumerate(args)) | dict[int | str, Any](kwargs)


def stream_in(stream: Stream, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The stream that enters a block: of the tensors shaped like the first, the one in the declared slot.

    If a block takes only one such tensor, it is the stream.

    Raises:
        SiteError: an argument was declared to be the stream, and there is no such tensor.
    """
    if stream.argument is not None:
        named = by_place(args, kwargs).get(stream.argument)
        if not isinstance(named, Tensor):
            raise SiteError(
                f"A block got no tensor as the argument {stream.argument!r}, which was said to be the stream."
            )
        return named
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
    """The stream that leaves a block, read from the declared slot; None if there is no such slot."""
    slots = slots_in(output)
    if stream.slot != "sum" or isinstance(output, Tensor):
        return slots.get(str(stream.slot)) if stream.slot else next(iter(slots.values()), None)
    first = next(iter(slots.values()), None)
    alike = [value for value in slots.values() if first is not None and value.shape == first.shape]
    return alike[0] + alike[1] if len(alike) > 1 else None


def slots_in(output: Any) -> dict[str, Tensor]:
    """The floating tensors that a block returns, by number or name."""
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
    """The same output with another tensor in place of the stream."""
    if isinstance(output, Tensor):
        return new
    old = output_tensor(output)
    if isinstance(output, (tuple, list)):
        items = [new if item is old else item for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if type(output) is dict:
        return {name: new if item is old else item for name, item in output.items()}
    raise SiteError(
        f"A {type(output).__name__} came out where a tensor or a tuple with one was expected. "
        "Name the blocks that return one with blocks=."
    )


def with_another(values: Any, old: Tensor, new: Tensor) -> Any:
    """The same arguments with one tensor replaced, wherever it is in them."""
    return pytree.tree_map(lambda leaf: new if leaf is old else leaf, values)


def tensors_in(values: object, depth: int = 2) -> list[Tensor]:
    """Tensors among call arguments, looking into lists, tuples and dicts."""
    # Every operator of a traced pass comes here, and tree_leaves of torch.utils._pytree takes twice as long.
    if isinstance(values, torch.Tensor):
        return [values]
    if depth == 0 or values is None or isinstance(values, (int, float, str)):
        return []
    if isinstance(values, (tuple, list)):
        items: Iterable[object] = values
    elif isinstance(values, Mapping):
        items = values.values()
    else:
        return []
    tensors: list[Tensor] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif depth > 1:
            tensors += tensors_in(item, depth - 1)
    return tensors
