"""Comparisons, masks, selections and constants: decided in ordinary arithmetic, applied to every part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope.exact_arithmetic.registry import rule
from rankscope.exact_arithmetic.rules.activations import largest
from rankscope.exact_arithmetic.rules.arithmetic import plain_part, shape_of
from rankscope.exact_arithmetic.rules.piecewise import maximum, minimum
from rankscope.exact_arithmetic.tensor import Deviation, merged
from rankscope.exact_arithmetic.terms import Term, broadcast, exp

aten = torch.ops.aten


def _compare(operation: Any) -> Any:
    def decide(a: Any, b: Any) -> Tensor:
        out: Tensor = operation(*(x.to_plain() if isinstance(x, Deviation) else x for x in (a, b)))
        return out

    return decide


for _operation in (aten.gt, aten.ge, aten.lt, aten.le, aten.eq, aten.ne):
    rule(_operation)(_compare(_operation))


@rule(aten.masked_fill)
def masked_fill(x: Deviation, mask: Tensor, value: Any) -> Deviation:
    """Set entries to a number."""
    chosen = plain_part(mask, x).bool()
    shape = shape_of(x, mask)
    # The mask makes rows of the base differ: use it in full, and the base gets one row per token.
    if broadcast(x.base.shape, chosen.shape).numel() > x.base.numel():
        chosen = mask
    terms = [Term(s, v.masked_fill(chosen, 0.0)) for s, v in x.terms]
    return Deviation(x.base.masked_fill(chosen, float(value)), terms, shape)


@rule(aten.where)
def where(condition: Tensor, a: Any, b: Any) -> Deviation:
    """Select entries from one or the other.

    If rows select differently because a deviation crosses a kink, the base follows the first row; if they do because of
    a mask, the base gets separate rows.
    """
    if isinstance(condition, Deviation):
        condition = condition.to_plain().bool()
    one, other = (merged(x) if isinstance(x, Deviation) else _constant(x, condition) for x in (a, b))
    shape = shape_of(condition, a, b)
    terms = [Term(s, torch.where(condition, v, 0.0)) for s, v in one.terms]
    terms += [Term(s, torch.where(condition, 0.0, v)) for s, v in other.terms]
    first = _first_row(condition, broadcast(one.base.shape, other.base.shape))
    base = torch.where(first, one.base, other.base)
    if first.shape != condition.shape and bool((first != condition).any()):
        # A jump of the size of the deviations is a kink that some rows crossed; a larger one is a mask.
        jump = torch.where(condition, one.base, other.base) - base
        sizes = [exp(s) * largest(v) for s, v in (*one.terms, *other.terms)]
        if not largest(jump) <= 4 * max(sizes, default=0.0):
            return merged(Deviation(torch.where(condition, one.base, other.base), terms, shape))
        terms.append(Term(0.0, jump))
    return merged(Deviation(base, terms, shape))


def _first_row(condition: Tensor, stored: Sequence[int]) -> Tensor:
    """The condition at the first entry of every axis along which the values are constant."""
    for back in range(1, min(condition.dim(), len(stored)) + 1):
        if stored[-back] == 1 < condition.shape[-back]:
            condition = condition.narrow(-back, 0, 1)
    return condition


def _constant(value: Any, like: Tensor) -> Deviation:
    return Deviation(torch.as_tensor(value, device=like.device).double())


def _filled(x: Deviation, value: float) -> Deviation:
    return Deviation(torch.full((1,) * x.dim(), value, dtype=torch.float64, device=x.device), (), x.shape)


@rule(aten.zeros_like, aten.empty_like)
def zeros_like(x: Deviation, **options: Any) -> Deviation:
    """Zeros of the same shape."""
    return _filled(x, 0.0)


@rule(aten.ones_like)
def ones_like(x: Deviation, **options: Any) -> Deviation:
    """Ones."""
    return _filled(x, 1.0)


@rule(aten.full_like)
def full_like(x: Deviation, value: float, **options: Any) -> Deviation:
    """A constant of the same shape."""
    return _filled(x, float(value))


@rule(aten.zero)
def zero(x: Deviation) -> Deviation:
    """Zeros."""
    return _filled(x, 0.0)


@rule(aten.new_zeros, aten.new_empty)
def new_zeros(x: Deviation, size: Sequence[int], *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Zeros of another shape."""
    if dtype is not None and not dtype.is_floating_point:
        return torch.zeros(tuple(size), dtype=dtype, device=x.device)
    return Deviation(torch.zeros((1,) * len(size), dtype=torch.float64, device=x.device), (), size)


@rule(aten.new_ones)
def new_ones(x: Deviation, size: Sequence[int], *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Ones of another shape, in plain arithmetic."""
    return torch.ones(tuple(size), dtype=dtype or torch.float64, device=x.device)


@rule(aten.copy)
def copy(target: Tensor, source: Tensor, *options: Any) -> Deviation:
    """The value written by an assignment, in the shape of the target."""
    out = source if isinstance(source, Deviation) else Deviation(source.double())
    return Deviation(out.base, out.terms, target.shape)


@rule(aten.topk)
def topk(x: Deviation, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Deviation, Tensor]:
    """Select in ordinary arithmetic; the selected values keep their deviations."""
    from rankscope.exact_arithmetic.rules.indexing import gather

    index = x.to_plain().topk(k, dim, largest, sorted).indices
    return gather(x, dim, index), index


@rule(aten.max)
def max_(x: Any, *args: Any, **kwargs: Any) -> Any:
    """The larger of two, or the largest in ordinary arithmetic."""
    if args and isinstance(args[0], Tensor):
        return maximum(x, args[0])
    return x.to_plain().max(*args, **kwargs)


@rule(aten.min)
def min_(x: Any, *args: Any, **kwargs: Any) -> Any:
    """The smaller of two, or the smallest in ordinary arithmetic."""
    if args and isinstance(args[0], Tensor):
        return minimum(x, args[0])
    return x.to_plain().min(*args, **kwargs)
