"""Operations that rearrange values without changing them: the same is done to the base and to every term.

Parts are first expanded (without copying), so that the same call works for all of them. Axes along which the result is
still constant have stride 0 and are stored with size 1 again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope.exact_arithmetic.registry import refuse, rule
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.exact_arithmetic.terms import Term, broadcast, common_parts, exp, gathered

aten = torch.ops.aten
Move = Callable[[Tensor], Tensor]
WriteBack = Callable[[Tensor, Tensor], Tensor]


def compressed(part: Tensor) -> Tensor:
    """Reduce axes of stride 0 to size 1."""
    for axis, (size, stride) in enumerate(zip(part.shape, part.stride(), strict=True)):
        if size > 1 and stride == 0:
            part = part.narrow(axis, 0, 1)
    return part


def moved(x: Deviation, move: Move, *, null_axis: int | None = None) -> Deviation:
    """Apply ``move`` to every part; ``null_axis`` is the position of the null axis in the result."""
    base = move(x.base.expand(x.shape))
    terms = tuple(Term(term.log_scale, compressed(move(term.values.expand(x.shape)))) for term in x.terms)
    kept = x.base_sum if null_axis is not None else None
    return Deviation(compressed(base), terms, base.shape, null_axis=null_axis, base_sum=kept)


def view_of(x: Deviation, move: Move, *, null_axis: int | None = None, back: WriteBack | None = None) -> Deviation:
    """Apply ``move`` to every part, for an operation whose result shares memory with ``x``.

    ``back(part of x, part of the result)`` returns that part of ``x`` after the result was written to, if known.
    """
    out = moved(x, move, null_axis=null_axis)
    out.source, out.write_back = weakref.ref(x), back
    return out


@rule(aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias)
def _view(x: Deviation, size: Sequence[int], *strides: Any) -> Deviation:
    known = torch.Size([entry for entry in size if entry != -1]).numel()
    shape = tuple(entry if entry != -1 else x.numel() // max(known, 1) for entry in size)
    null = None if x.null_axis is None else _axis_after(x.shape, x.null_axis, shape)

    def write_back(old: Tensor, new: Tensor) -> Tensor:
        return new.reshape(old.shape)

    base, terms = _reshaped(x.base, x.shape, shape), [Term(s, _reshaped(v, x.shape, shape)) for s, v in x.terms]
    # After the reshape, a term may be constant over the same rows as the base, and then belongs to it.
    if len(shape) > 1 and base.dim() == len(shape) and base.shape[-2] == 1 < shape[-2]:
        base, terms = common_parts(base, terms)
    if len(terms) > 1:
        terms = list(gathered(terms))
    kept = x.base_sum if null is not None else None
    out = Deviation(base, terms, shape, null_axis=null, base_sum=kept)
    out.source, out.write_back = weakref.ref(x), write_back
    return out


def _reshaped(part: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """A stored part in a new shape; axes on which it is constant and that survive the reshape stay at size 1."""
    wide, narrow = list(before), list(after)
    for axis, size in enumerate(before):
        target = _axis_after(before, axis, after) if part.shape[axis] == 1 < size else None
        if target is not None:
            wide[axis] = narrow[target] = 1
    return compressed(part.expand(wide).reshape(narrow))


def _axis_after(before: Sequence[int], axis: int, after: Sequence[int]) -> int | None:
    """The position of an axis after a reshape: the axis of the same length with as many entries after it."""
    behind = torch.Size(before[axis + 1 :]).numel()
    for place, size in enumerate(after):
        if size == before[axis] and torch.Size(after[place + 1 :]).numel() == behind:
            return place
    return None


@rule(aten.permute)
def _permute(x: Deviation, dims: Sequence[int]) -> Deviation:
    order = [axis % x.dim() for axis in dims]
    null = None if x.null_axis is None else order.index(x.null_axis)
    inverse = [order.index(axis) for axis in range(x.dim())]
    return view_of(x, lambda part: part.permute(order), null_axis=null, back=lambda old, new: new.permute(inverse))


@rule(aten.transpose)
def _transpose(x: Deviation, one: int, other: int) -> Deviation:
    order = list(range(x.dim()))
    order[one], order[other] = order[other], order[one]
    return _permute(x, order)


@rule(aten.t)
def _t(x: Deviation) -> Deviation:
    return _permute(x, (1, 0)) if x.dim() == 2 else x


@rule(aten.expand)
def _expand(x: Deviation, size: Sequence[int], *, implicit: bool = False) -> Deviation:
    added = len(size) - x.dim()
    shape = [x.shape[i - added] if entry == -1 else entry for i, entry in enumerate(size)]
    null = None if x.null_axis is None else x.null_axis + added
    return view_of(x, lambda part: part.expand(shape), null_axis=null)


@rule(aten.unsqueeze)
def _unsqueeze(x: Deviation, dim: int) -> Deviation:
    axis = dim % (x.dim() + 1)
    null = None if x.null_axis is None else x.null_axis + (axis <= x.null_axis)
    return view_of(x, lambda part: part.unsqueeze(axis), null_axis=null, back=lambda old, new: new.squeeze(axis))


@rule(aten.squeeze)
def _squeeze(x: Deviation, dim: int | Sequence[int] | None = None) -> Deviation:
    asked = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    shape = list(x.shape)
    for axis in sorted((axis % x.dim() for axis in asked), reverse=True):
        if shape[axis] == 1:
            del shape[axis]
    return _view(x, shape)


@rule(aten.slice)
def _slice(x: Deviation, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Deviation:
    axis = dim % x.dim()
    taken = slice(start, end, step)
    index = (slice(None),) * axis + (taken,)
    every = range(x.shape[axis])
    whole = x.null_axis is not None and (x.null_axis != axis or every[taken] == every or _rest_is_zero(x, axis, taken))
    return view_of(
        x,
        lambda part: part[index],
        null_axis=x.null_axis if whole else None,
        back=lambda old, new: old.slice_scatter(new, axis, start, end, step),
    )


def _rest_is_zero(x: Deviation, axis: int, taken: slice) -> bool:
    """Whether everything outside a slice is exactly zero, such as a hidden sink, so that sums do not change."""
    left = torch.tensor([place not in range(x.shape[axis])[taken] for place in range(x.shape[axis])])
    parts = (x.base, *(term.values for term in x.terms))
    return all(part.shape[axis] == left.numel() and not bool(part.movedim(axis, 0)[left].any()) for part in parts)


@rule(aten.select)
def _select(x: Deviation, dim: int, index: int) -> Deviation:
    return view_of(x, lambda part: part.select(dim, index), back=lambda old, new: old.select_scatter(new, dim, index))


@rule(aten.narrow)
def _narrow(x: Deviation, dim: int, start: int, length: int) -> Deviation:
    return _slice(x, dim, start, start + length)


@rule(aten.split, aten.split_with_sizes, aten.unsafe_split)
def _split(x: Deviation, size: int | Sequence[int], dim: int = 0) -> list[Deviation]:
    length = x.shape[dim]
    sizes = [min(size, length - at) for at in range(0, length, size)] if isinstance(size, int) else list(size)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_narrow(x, dim, start, length) for start, length in zip(starts, sizes, strict=True)]


@rule(aten.unbind)
def _unbind(x: Deviation, dim: int = 0) -> list[Deviation]:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


@rule(aten.flip)
def _flip(x: Deviation, dims: Sequence[int]) -> Deviation:
    axes = list(dims)
    return Deviation(x.base.flip(axes), [Term(s, v.flip(axes)) for s, v in x.terms], x.shape)


@rule(aten.roll)
def _roll(x: Deviation, shifts: Sequence[int], dims: Sequence[int] = ()) -> Deviation:
    by, axes = list(shifts), list(dims)
    if not axes:
        return moved(x, lambda part: part.roll(by))
    terms = [Term(s, v.roll(by, axes)) for s, v in x.terms]
    return Deviation(x.base.roll(by, axes), terms, x.shape, null_axis=x.null_axis, base_sum=x.base_sum)


@rule(aten.repeat_interleave)
def _repeat_interleave(x: Deviation, repeats: Any, dim: int | None = None, **options: Any) -> Deviation:
    if isinstance(repeats, Tensor):
        refuse("aten.repeat_interleave", "it repeats by a tensor of counts, and the rule knows one number")
    if dim is None:
        x, dim = _view(x, (-1,)), 0
    axis = dim % x.dim()
    shape = list(x.shape)
    wide = _expand(_unsqueeze(x, axis + 1), [*shape[: axis + 1], repeats, *shape[axis + 1 :]])
    return _view(wide, [*shape[:axis], shape[axis] * repeats, *shape[axis + 1 :]])


@rule(aten.view_as_complex)
def _view_as_complex(x: Deviation) -> Deviation:
    return moved(x, lambda part: torch.view_as_complex(part.contiguous()))


@rule(aten.view_as_real)
def _view_as_real(x: Deviation) -> Deviation:
    return moved(x, torch.view_as_real)


@rule(aten.repeat)
def _repeat(x: Deviation, repeats: Sequence[int]) -> Deviation:
    before = (1,) * (len(repeats) - x.dim()) + tuple(x.shape)
    shape = [size * times for size, times in zip(before, repeats, strict=True)]

    def repeated(part: Tensor) -> Tensor:
        part = part.reshape((1,) * (len(repeats) - part.dim()) + part.shape)
        return part.repeat([1 if size == 1 else times for size, times in zip(part.shape, repeats, strict=True)])

    return Deviation(repeated(x.base), [Term(s, repeated(v)) for s, v in x.terms], shape)


@rule(aten.constant_pad_nd)
def _pad(x: Deviation, pad: Sequence[int], value: float = 0.0) -> Deviation:
    if not any(pad):
        return _same(x)
    # Padding is part of the base: deviations are padded with zeros, whatever the value.
    base = aten.constant_pad_nd(x.base.expand(x.shape), pad, value)
    terms = [Term(s, aten.constant_pad_nd(v.expand(x.shape), pad, 0.0)) for s, v in x.terms]
    return Deviation(base, terms, base.shape)


@rule(aten.tril, aten.triu)
def _triangle(x: Deviation, diagonal: int = 0) -> Deviation:
    refuse("aten.tril/triu", "a triangle of a deviation has no rule yet")


@rule(aten.clone, aten.contiguous, aten.detach, aten.alias, aten.lift_fresh, aten.native_dropout, aten.dropout)
def _same(x: Deviation, *options: Any, **named: Any) -> Deviation:
    return Deviation(x.base, x.terms, x.shape, null_axis=x.null_axis, base_sum=x.base_sum)


@rule(aten._to_copy, aten.to)
def _to(x: Deviation, *, dtype: torch.dtype | None = None, **options: Any) -> Deviation | Tensor:
    """Casts between float dtypes change nothing: exact arithmetic always uses float64."""
    if dtype is not None and dtype.is_complex:
        refuse("a cast to complex numbers")
    if dtype is not None and not dtype.is_floating_point:
        return x.to_plain().to(dtype)
    return _same(x)


@rule(aten.cat)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Deviation:
    parts = [t if isinstance(t, Deviation) else Deviation(t.double()) for t in tensors if t.numel()]
    axis = dim % parts[0].dim()
    if len(parts) == 1:
        return _same(parts[0])
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    base = _joined([(part.base, part.shape[axis]) for part in parts], axis)
    count = max(len(part.terms) for part in parts)
    terms = []
    for number in range(count):
        # Pieces of one term must share a scale: use the largest.
        held = [part.terms[number] if number < len(part.terms) else None for part in parts]
        top = max(term.log_scale for term in held if term is not None)
        pieces = [
            (_zeros(part) if term is None else term.values * exp(term.log_scale - top), part.shape[axis])
            for part, term in zip(parts, held, strict=True)
        ]
        terms.append(Term(top, _joined(pieces, axis)))
    return Deviation(base, terms, shape)


def _zeros(part: Deviation) -> Tensor:
    return part.base.new_zeros((1,) * part.dim())


def _joined(pieces: Sequence[tuple[Tensor, int]], axis: int) -> Tensor:
    """Concatenate stored parts; axes on which all are constant keep size 1."""
    first = pieces[0][0]
    if first.shape[axis] == 1 and all(length > 1 and torch.equal(part, first) for part, length in pieces):
        return first
    others = [[*part.shape[:axis], 1, *part.shape[axis + 1 :]] for part, _ in pieces]
    shape = list(broadcast(*others))
    wide = [part.expand([*shape[:axis], length, *shape[axis + 1 :]]) for part, length in pieces]
    return torch.cat(wide, dim=axis)


@rule(aten.stack)
def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Deviation:
    return _cat([t.unsqueeze(dim) for t in tensors], dim)
