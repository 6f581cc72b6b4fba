"""A model run without its weights, to see how it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rankscope.execution.offload.meta_model import Slot

_SMALL = 2**16


@contextmanager
def standing_in(slots: Mapping[str, Slot]) -> Iterator[None]:
    """Inside the block zeros that take no room stand for all weights, so that the model can be run to see its parts."""
    before = _put_zeros(slots)
    try:
        with _ZeroProducts():
            yield
    finally:
        for name, empty in before.items():
            slots[name].put(empty)


class _ZeroProducts(TorchFunctionMode):
    """What a linear layer of zeros gives is known without multiplying."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Zeros for ``linear``; anything else as it is."""
        if func is F.linear and not kwargs:
            return args[0].new_zeros((*args[0].shape[:-1], args[1].shape[0]))
        return func(*args, **(kwargs or {}))


def _put_zeros(slots: Mapping[str, Slot]) -> dict[str, Tensor]:
    """Fill every empty parameter; returns what was there."""
    zeros: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
    before = {}
    for name, slot in slots.items():
        parameter = slot.parameter
        if parameter.is_meta:
            before[name] = parameter.data
            key = parameter.shape, parameter.dtype
            if key not in zeros:
                zeros[key] = _untouched(parameter)
            slot.put(zeros[key])
    return before


def _untouched(like: Tensor) -> Tensor:
    """Zeros the system has promised and not yet given; torch's own are written, and so take room."""
    if like.nbytes < _SMALL:
        return torch.zeros(like.shape, dtype=like.dtype)
    return torch.from_numpy(np.zeros(like.nbytes, dtype=np.uint8)).view(like.dtype).view(like.shape)
