"""The matrices of a mixture's experts, read one expert at a time while the block runs.

A block of some hundred experts may not fit into memory, but each expert works on its own tokens. The stacked parameter
is replaced by a tensor without data: a grouped product over it is computed group by group, with the same kernel, and
each expert's matrix is read just before its group and dropped after it. Anything else that is done with the parameter
is refused, so that the result is what the model computes, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import UnsupportedConfigError
from rankscope.models.weight_files.tensors import StoredTensor, planned_reads

EXPERTS_AT_ONCE = 4
"""Experts in memory at a time: one computes, the next ones are being read."""
_METADATA = frozenset(
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_meta")
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point}
_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
"""What transformers calls for a product over all experts; which of them depends on the versions."""


class LazyExperts(Tensor):
    """A stack of matrices, one per expert, without data.

    Args:
        like: a tensor with its shape and dtype, on the meta device.
        parts: for each expert, its stored tensors and the rows of its matrix that each fills; None for all rows.
        readers: reads the next experts meanwhile.
        name: name of the parameter, for messages.
    """

    @staticmethod
    def __new__(cls, like: Tensor, *words: Any, **named: Any) -> LazyExperts:
        """A wrapper that has metadata and no storage."""
        lazy: LazyExperts = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=torch.device("cpu")
        )
        return lazy

    def __init__(
        self,
        like: Tensor,
        parts: Sequence[Sequence[tuple[StoredTensor, tuple[int, int] | None]]],
        readers: Executor,
        name: str,
        *,
        turned: bool = False,
    ) -> None:
        self._like, self._parts, self._readers, self._name, self._turned = like, parts, readers, name, turned

    def expert(self, number: int) -> Tensor:
        """The matrix of one expert, read now."""
        turned = self._like.transpose(-2, -1) if self._turned else self._like
        weights = torch.empty(turned.shape[1:], dtype=turned.dtype)
        places = [
            (stored, weights if rows is None else weights[rows[0] : rows[1]]) for stored, rows in self._parts[number]
        ]
        for read in planned_reads(places):
            read()
        return weights.transpose(-2, -1) if self._turned else weights

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyExperts({self._name}, shape={tuple(self._like.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Metadata, transposition, one expert by number, and grouped products; anything else is refused."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        own = next(one for one in (*args, *kwargs.values()) if isinstance(one, LazyExperts))
        if func is Tensor.transpose and set(args[1:]) in ({-2, -1}, {1, 2}) and not kwargs:
            turned = own._like.transpose(-2, -1)
            return LazyExperts(turned, own._parts, own._readers, own._name, turned=not own._turned)
        if func is Tensor.__getitem__ and isinstance(args[1], (int, Tensor)) and torch.as_tensor(args[1]).numel() == 1:
            expert = own.expert(int(args[1]))
            return expert if torch.as_tensor(args[1]).ndim == 0 else expert[None]
        given = {name: value for name, value in kwargs.items() if value is not None}
        if getattr(func, "__name__", "") in _GROUPED and len(args) == 2 and args[1] is own and set(given) == {"offs"}:
            return own._grouped(func, args[0], given["offs"])
        raise own._refusal(func)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """There is no data to dispatch on; reached only past :meth:`__torch_function__`, which refuses first."""
        raise next(one for one in args if isinstance(one, LazyExperts))._refusal(func)

    def _refusal(self, func: Any) -> UnsupportedConfigError:
        return UnsupportedConfigError(
            f"This model does more with {self._name} than multiply by one expert after the other "
            f"({getattr(func, '__name__', func)}), so its experts cannot be read one at a time. Leave memory out."
        )

    def _grouped(self, func: Callable[..., Tensor], tokens: Tensor, offs: Tensor) -> Tensor:
        """A grouped product, one group at a time."""
        ends = [int(end) for end in offs.tolist()]
        starts = [0, *ends[:-1]]
        busy = [number for number, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]
        products = tokens.new_zeros((tokens.shape[0], self._like.shape[-1]))
        for number, matrix in zip(busy, self._in_turn(busy), strict=True):
            start, end = starts[number], ends[number]
            group = torch.tensor([end - start], dtype=offs.dtype)
            products[start:end] = func(tokens[start:end], matrix[None], offs=group)
        return products

    def _in_turn(self, numbers: Sequence[int]) -> Iterator[Tensor]:
        """The matrices of these experts, the next ones being read meanwhile."""
        coming: list[Future[Tensor]] = []
        waiting = iter(numbers)
        for _ in numbers:
            while len(coming) < EXPERTS_AT_ONCE - 1 and (number := next(waiting, None)) is not None:
                coming.append(self._readers.submit(self.expert, number))
            yield coming.pop(0).result()
