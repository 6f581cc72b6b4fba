"""Selecting rows and entries by index, and writing them back: how tokens are sent to experts and returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope.exact_arithmetic.registry import refuse, rule
from rankscope.exact_arithmetic.tensor import Deviation, written
from rankscope.exact_arithmetic.terms import Term

aten = torch.ops.aten


@rule(aten.index, aten._unsafe_index)
def index(x: Any, indices: Sequence[Tensor | None]) -> Deviation:
    """``x[indices]``; a base that is constant along the indexed axis stays constant."""
    picked = [i for i, entry in enumerate(indices) if entry is not None]
    shape = aten.index(torch.empty(x.shape, device="meta"), [_on_meta(entry) for entry in indices]).shape
    integers = all(entry.dtype != torch.bool for entry in indices if entry is not None)
    consecutive = integers and picked == list(range(picked[0], picked[-1] + 1))

    def along(part: Tensor) -> Tensor:
        # The part is constant along the indexed axes: whatever is picked is the same, only the number of axes changes.
        if consecutive and all(part.shape[i] == 1 for i in picked):
            axes = len(shape) - x.dim() + len(picked)
            return part.reshape([*part.shape[: picked[0]], *(1,) * axes, *part.shape[picked[-1] + 1 :]])
        wide = [x.shape[i] if i in picked or not integers else size for i, size in enumerate(part.shape)]
        out: Tensor = aten.index(part.expand(wide), indices)
        return out

    return Deviation(along(x.base), [Term(s, along(v)) for s, v in x.terms], shape)


def _on_meta(entry: Tensor | None) -> Tensor | None:
    if entry is None:
        return None
    if entry.dtype == torch.bool:
        return torch.empty(int(entry.sum()), dtype=torch.int64, device="meta") if entry.dim() == 1 else entry
    return torch.empty(entry.shape, dtype=torch.int64, device="meta")


@rule(aten.index_select)
def index_select(x: Deviation, dim: int, chosen: Tensor) -> Deviation:
    """Slices along one axis."""
    axis = dim % x.dim()
    return index(x, [None] * axis + [chosen])


@rule(aten.gather)
def gather(x: Deviation, dim: int, chosen: Tensor, *, sparse_grad: bool = False) -> Deviation:
    """One entry per index; if all rows use the same indices, a one-row base stays one row."""
    axis = dim % x.dim()
    first = chosen
    for other in range(x.dim()):
        if other != axis and x.base.shape[other] == 1 < chosen.shape[other]:
            head = first.narrow(other, 0, 1)
            first = head if bool((first == head).all()) else first
    wide = [first.shape[i] if i != axis else x.shape[axis] for i in range(x.dim())]
    wide = [max(size, x.base.shape[i]) if x.base.shape[i] > 1 else size for i, size in enumerate(wide)]
    base = x.base.expand(wide).gather(axis, first)
    return Deviation(base, [Term(s, v.expand(x.shape).gather(axis, chosen)) for s, v in x.terms], chosen.shape)


@rule(aten.index_add)
def index_add(x: Any, dim: int, chosen: Tensor, source: Any, *, alpha: float = 1) -> Deviation:
    """Add rows to rows."""
    return _written(x, source, lambda old, new: old.index_add(dim, chosen, new, alpha=alpha))


@rule(aten.index_put, aten._index_put_impl)
def index_put(x: Any, indices: Sequence[Tensor | None], values: Any, accumulate: bool = False, *rest: Any) -> Deviation:
    """``x[indices] = values``."""
    return _written(x, values, lambda old, new: aten.index_put(old, indices, new, accumulate))


@rule(aten.slice_scatter)
def slice_scatter(x: Any, source: Any, *place: Any, **named: Any) -> Deviation:
    """Write a slice."""
    return _written(x, source, lambda old, new: aten.slice_scatter(old, new, *place, **named))


@rule(aten.scatter)
def scatter(x: Any, dim: int, chosen: Tensor, source: Any, **options: Any) -> Deviation:
    """Write entries by index, from a tensor or one number."""
    if options:
        refuse("aten.scatter", f"it reduces by {options}, and the rule only writes")
    if isinstance(source, Tensor):
        return _written(x, source, lambda old, new: old.scatter(dim, chosen, new))
    number = Deviation(
        torch.full((1,) * x.dim(), float(source), dtype=torch.float64, device=x.device), (), chosen.shape
    )
    return _written(x, number, lambda old, new: old.scatter(dim, chosen, new))


@rule(aten.scatter_add)
def scatter_add(x: Any, dim: int, chosen: Tensor, source: Any) -> Deviation:
    """Add entries by index."""
    return _written(x, source, lambda old, new: old.scatter_add(dim, chosen, new))


def _written(x: Any, source: Any, write: Any) -> Deviation:
    held, other = (t if isinstance(t, Deviation) else Deviation(t.double()) for t in (x, source))
    return written(held, other, write)
