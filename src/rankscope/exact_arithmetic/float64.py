"""Runs everything in float64: the model's weights, and what its code would cast to narrower formats.

The function that is evaluated stays the model's own: constants that depend on the dtype, such as the default epsilon of
an RMSNorm, are those of the dtype in which the model was given.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rankscope.linalg.precision import need_float64
from rankscope.models.inputs import Batch
from rankscope.models.linear_maps import dense
from rankscope.models.loading.devices import device_of

_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})
_CASTS = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})

_RMS_NORMS = frozenset({torch.rms_norm, torch.nn.functional.rms_norm})

_GROUPED = frozenset(
    function
    for function in (getattr(torch, "_grouped_mm", None), getattr(torch.nn.functional, "grouped_mm", None))
    if function is not None
)


class WideArithmetic(TorchFunctionMode):
    """A function mode that turns every request for a narrower float dtype into one for float64.

    Models cast to float32 inside norms, softmax and rotary embeddings; in a float64 run that would be a floor at 1e-7.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with the wider dtype."""
        kwargs = kwargs or {}
        if func in _CASTS:
            return args[0].double()
        if func in _GROUPED and type(args[0]) is Tensor and args[0].dtype == torch.float64:
            return _grouped_product(*args, **kwargs)
        if func in _RMS_NORMS and _own_format != torch.float64:
            if len(args) > 3:
                args = (*args[:3], rms_epsilon(_own_format) if args[3] is None else args[3])
            elif kwargs.get("eps") is None:
                kwargs = {**kwargs, "eps": rms_epsilon(_own_format)}
        if any(_is_narrow(value) for value in (*args, *kwargs.values())):
            args = tuple(torch.float64 if _is_narrow(value) else value for value in args)
            kwargs = {name: torch.float64 if _is_narrow(value) else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _grouped_product(rows: Tensor, weight: Tensor, offs: Tensor | None = None, **options: Any) -> Tensor:
    """Torch's grouped matrix product for mixtures of experts, which does not support float64."""
    if offs is None:
        return rows @ weight
    ends = [0, *offs.tolist()]
    groups = [rows[a:b] @ matrix for a, b, matrix in zip(ends[:-1], ends[1:], weight, strict=True)]
    rest = rows.new_zeros(rows.shape[0] - ends[-1], weight.shape[-1])
    return torch.cat([*groups, rest])


def _is_narrow(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROW


@functools.cache
def rms_epsilon(dtype: torch.dtype) -> float:
    """The default epsilon of ``rms_norm`` for this dtype, which depends on the version of torch."""
    # y = x / sqrt(x² + eps), so eps = (x / y)² - x², rounded to the power of two that it is.
    x = torch.tensor([2.0**-12], dtype=dtype)
    y = torch.nn.functional.rms_norm(x, (1,))
    return float(2.0 ** torch.log2((x.double() / y.double()).square() - x.double().square()).round())


_own_format = torch.float64
_finfo = torch.finfo


def _finfo_of_own_format(dtype: torch.dtype | None = None) -> torch.finfo:
    """``torch.finfo``, except that the model's code gets the model's original dtype if it asks for float64."""
    if dtype is None:
        return _finfo()
    asked_by = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
    return _finfo(_own_format if dtype == torch.float64 and asked_by not in ("torch", "rankscope") else dtype)


@contextmanager
def _constants_of(dtype: torch.dtype) -> Iterator[None]:
    global _own_format
    before = _own_format
    _own_format = dtype
    torch.finfo = _finfo_of_own_format  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        _own_format = before
        if before == torch.float64:
            torch.finfo = _finfo  # type: ignore[misc]


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Hold the model's weights in float64 inside the ``with`` block; the original tensors are restored afterwards.

    Meanwhile, a float32 model takes three times its memory; a float64 model takes no additional memory. Quantised and
    adapted linear layers are replaced by dense ones.
    """
    need_float64(device_of(model.parameters()), "Exact arithmetic")
    with dense(model), _widened_weights(model):
        yield


@contextmanager
def _widened_weights(model: nn.Module) -> Iterator[None]:
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
        # The model's original dtype is that of most of its weights. In a nested call, no weights are narrow any more.
        sizes: Counter[torch.dtype] = Counter()
        for _, data in held:
            sizes[data.dtype] += data.numel()
        with _constants_of(sizes.most_common(1)[0][0]) if sizes else nullcontext():
            yield
    finally:
        for parameter, data in held:
            parameter.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def widened(batch: Batch) -> Batch:
    """The batch with its floating point inputs (images, audio, embeddings) in float64."""

    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return replace(
        batch,
        inputs={name: wide(value) for name, value in batch.inputs.items()},
        arguments=tuple(wide(value) for value in batch.arguments),
    )
