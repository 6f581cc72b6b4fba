"""Sums and means; along an axis on which a part is constant, the sum is a multiplication by its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope.exact_arithmetic.registry import rule
from rankscope.exact_arithmetic.rules.arithmetic import add, mul, sqrt
from rankscope.exact_arithmetic.rules.shapes import moved
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.exact_arithmetic.terms import Term

aten = torch.ops.aten


def _axes(x: Deviation, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(x.dim()))
    return [axis % x.dim() for axis in ([dim] if isinstance(dim, int) else dim)]


def _shape(x: Deviation, axes: Sequence[int]) -> list[int]:
    return [1 if axis in axes else size for axis, size in enumerate(x.shape)]


def _without(x: Deviation, axes: Sequence[int], keepdim: bool) -> Deviation:
    if keepdim:
        return x
    kept = [axis for axis in range(x.dim()) if axis not in axes]

    def drop(part: Tensor) -> Tensor:
        return part.permute(*kept, *axes).reshape([part.shape[axis] for axis in kept])

    return moved(x, drop)


@rule(aten.sum)
def sum_(x: Deviation, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Deviation:
    """Sum along axes."""
    axes = _axes(x, dim)

    def along(part: Tensor) -> Tensor:
        lengths = [x.shape[axis] for axis in axes if part.shape[axis] == 1]
        return part.sum(dim=axes, keepdim=True) * float(torch.Size(lengths).numel())

    base, terms = along(x.base), [Term(s, along(v)) for s, v in x.terms]
    # Along the null axis the terms are known to sum to exactly zero, and the base to ``base_sum``.
    if x.null_axis is not None and axes == [x.null_axis]:
        base = base if x.base_sum is None else torch.full_like(x.base.narrow(axes[0], 0, 1), x.base_sum)
        terms = []
    return _without(Deviation(base, terms, _shape(x, axes)), axes, keepdim)


@rule(aten.mean)
def mean(x: Deviation, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Deviation:
    """Mean along axes."""
    length = torch.Size([x.shape[axis] for axis in _axes(x, dim)]).numel()
    return mul(sum_(x, dim, keepdim), 1.0 / length)


@rule(aten.var)
def var(x: Deviation, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Deviation:
    """Variance along axes: the mean square of the deviations from the mean."""
    # From deviations, not as mean(x^2) - mean(x)^2: that would subtract two numbers that agree in all their digits.
    axes = _axes(x, dim)
    length = torch.Size([x.shape[axis] for axis in axes]).numel()
    centred = add(x, mean(x, axes, True), alpha=-1)
    return mul(sum_(mul(centred, centred), axes, keepdim), 1.0 / (length - (1 if correction is None else correction)))


@rule(aten.std)
def std(x: Deviation, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Deviation:
    """Standard deviation: the root of the variance."""
    return sqrt(var(x, dim, correction=correction, keepdim=keepdim))


@rule(aten.linalg_vector_norm)
def vector_norm(
    x: Deviation, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Deviation:
    """Euclidean length along axes."""
    if ord != 2:
        from rankscope.exact_arithmetic.registry import refuse

        refuse("aten.linalg_vector_norm", f"it takes the norm of order {ord}, and the rule knows order 2")
    return sqrt(sum_(mul(x, x), dim, keepdim))


@rule(aten.cumsum)
def cumsum(x: Deviation, dim: int, *, dtype: Any = None) -> Deviation:
    """Running sums, a linear map."""
    return moved(x, lambda part: part.cumsum(dim))


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    def read(x: Deviation, *args: Any, **kwargs: Any) -> Any:
        return function(x.to_plain(), *args, **kwargs)

    return read


# These return plain tensors, in which differences between tokens below rounding are lost.
for _name in ("amax", "amin", "argmax", "argmin", "argsort", "all", "any", "_local_scalar_dense", "isnan", "isinf"):
    rule(getattr(aten, _name))(_plain(getattr(aten, _name)))
