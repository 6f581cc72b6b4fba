"""Everything in float64: the model's weights, and what its code casts to narrower formats on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})
_CASTS = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})

_GROUPED = frozenset(
    function
    for function in (getattr(torch, "_grouped_mm", None), getattr(torch.nn.functional, "grouped_mm", None))
    if function is not None
)


class WideArithmetic(TorchFunctionMode):
    """A function mode under which every request for a narrower float format is one for float64.

    Models cast to float32 inside norms, softmax and rotary embeddings; in float64 that would be a floor at 1e-7.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with the wider format."""
        kwargs = kwargs or {}
        if func in _CASTS:
            return args[0].double()
        if func in _GROUPED and type(args[0]) is Tensor and args[0].dtype == torch.float64:
            return _grouped_product(*args, **kwargs)
        if any(_is_narrow(value) for value in (*args, *kwargs.values())):
            args = tuple(torch.float64 if _is_narrow(value) else value for value in args)
            kwargs = {name: torch.float64 if _is_narrow(value) else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _grouped_product(rows: Tensor, weight: Tensor, offs: Tensor | None = None, **options: Any) -> Tensor:
    """What torch's kernel for mixtures of experts does, which knows no float64."""
    if offs is None:
        return rows @ weight
    ends = [0, *offs.tolist()]
    groups = [rows[a:b] @ matrix for a, b, matrix in zip(ends[:-1], ends[1:], weight, strict=True)]
    rest = rows.new_zeros(rows.shape[0] - ends[-1], weight.shape[-1])
    return torch.cat([*groups, rest])


def _is_narrow(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROW


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Hold the model's weights in float64 for the length of a block; then the very tensors they were are put back.

    A float32 model takes three times its memory meanwhile; one that is in float64 already, nothing.
    """
    held: list[tuple[nn.Parameter, Tensor]] = []
    buffers: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for parameter in model.parameters():
            if parameter.dtype in _NARROW:
                held.append((parameter, parameter.data))
                parameter.data = parameter.data.double()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.dtype in _NARROW:
                    buffers.append((module, name, buffer))
                    module._buffers[name] = buffer.double()
        yield
    finally:
        for parameter, data in held:
            parameter.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
