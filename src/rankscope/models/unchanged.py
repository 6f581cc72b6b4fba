"""Whether a model is still what it was when something was found out about it.

What was proven about a model object need not be proven again, until somebody changes it: trains it, writes to its
weights in whatever way, replaces a module, sets an attribute, a field of its configuration, or a global variable that
its code reads. Only weak references are kept.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.models.wrapping import needs_all_ranks

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_LEFT_OUT = ("_parameters", "_buffers", "_modules", "training", *_HOOKS)
"""Attributes of modules that are compared one by one, or that say nothing: structure is found in evaluation mode. Hooks
are compared by identity: they often count."""
_SIMPLE = (int, float, str, bool, type(None), complex, bytes)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DEPTH = 4
"""How many containers, objects or functions deep values are compared; below that, only whether they are the same."""
_FIXED = {*sys.stdlib_module_names, "torch", "numpy", "transformers", "accelerate"}
"""Packages whose code is taken to have no switches but attributes and configurations."""


class Snapshot:
    """What decides how a model computes, at one moment.

    Args:
        model: the model.
        with_weights: whether numbers count. Reading them costs less than one forward pass.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> before = Snapshot(model)
        >>> before.fits(model)
        True
        >>> _ = model.bias.data.zero_()
        >>> before.fits(model)
        False
    """

    def __init__(self, model: nn.Module, *, with_weights: bool = True) -> None:
        self._with_weights = with_weights
        every_fact = list(_facts(model, with_weights))
        self._objects = [weakref.ref(owner) for owner, _ in every_fact]
        self._facts = [facts for _, facts in every_fact]

    def fits(self, model: nn.Module) -> bool:
        """Whether nothing has changed since."""
        place = 0
        for owner, facts in _facts(model, self._with_weights):
            if place == len(self._facts) or self._objects[place]() is not owner or self._facts[place] != facts:
                return False
            place += 1
        return place == len(self._facts)


def _facts(model: nn.Module, with_weights: bool) -> Iterator[tuple[nn.Module | Tensor, object]]:
    if needs_all_ranks(model):
        # What changed on one rank alone would let it run the model again while the others go on without it, for ever.
        yield from ((module, name) for name, module in model.named_modules())
        return
    reading = _Reading(with_weights)
    for name, module in model.named_modules(remove_duplicate=False):
        own = {key: value for key, value in vars(module).items() if key not in _LEFT_OUT}
        hooks = tuple(tuple(map(id, vars(module)[key].values())) for key in _HOOKS)
        yield module, (name, reading.of_class(type(module)), reading.of_all(own), hooks)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield tensor, (key, reading.of_tensor(tensor))


class _Reading:
    """Reads the facts of one model, each object once."""

    def __init__(self, with_weights: bool) -> None:
        self._with_weights = with_weights
        self._read: dict[int, object] = {}
        """What was read, by identity; it is kept alive, so that no other object gets the same."""

    def of_all(self, values: dict[str, Any], depth: int = _DEPTH) -> tuple[object, ...]:
        """Every value under its name."""
        return tuple((key, self._of(value, depth)) for key, value in values.items())

    def _of(self, value: Any, depth: int) -> object:
        """A plain value itself, what another one consists of, or its identity."""
        if isinstance(value, _SIMPLE):
            return value
        if isinstance(value, Tensor):
            return id(value), self.of_tensor(value)
        if not depth or id(value) in self._read or isinstance(value, (nn.Module, type, ModuleType)):
            return id(value)
        self._read[id(value)] = value
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return type(value), self.of_all({str(place): item for place, item in items}, depth - 1)
        if isinstance(value, FunctionType):
            is_fixed = (value.__module__ or "").partition(".")[0] in _FIXED
            return id(value), () if is_fixed else self._of_function(value, depth - 1)
        return id(value), self.of_all(vars(value), depth - 1) if hasattr(value, "__dict__") else ()

    def of_class(self, kind: type) -> object:
        """The forward of a class, and the methods and plain attributes of the class that it uses."""
        if id(kind) in self._read:
            return id(kind)
        self._read[id(kind)] = kind
        own = {
            name: value
            for base in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)])
            if base.__module__.partition(".")[0] not in _FIXED
            for name, value in vars(base).items()
        }
        facts: dict[str, Any] = {}
        waiting = ["forward"]
        while waiting:
            name = waiting.pop()
            value = own.get(name)
            value = getattr(value, "fget", None) or getattr(value, "__func__", value)  # a property, a class method
            value = inspect.unwrap(value) if isinstance(value, FunctionType) else value
            if name in facts or name not in own or not isinstance(value, (*_SIMPLE, FunctionType)):
                continue
            facts[name] = value
            waiting += _names(value.__code__) if isinstance(value, FunctionType) else []
        return id(kind), id(getattr(kind, "forward", None)), self.of_all(facts)

    def _of_function(self, function: FunctionType, depth: int) -> object:
        """The values that a function reads from outside: globals, what it closes over, and its defaults."""
        code, known = function.__code__, function.__globals__
        names = list(dict.fromkeys(_names(code)))
        facts: dict[str, Any] = {}
        for name in names:
            value = known.get(name)
            if isinstance(value, ModuleType):
                own = vars(value) if value.__name__.partition(".")[0] not in _FIXED else {}
                facts |= {f"{name}.{one}": own[one] for one in names if one in own and isinstance(own[one], _SIMPLE)}
            elif name in known:
                facts[name] = value
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                facts[f"{name} "] = cell.cell_contents
            except ValueError:  # not bound yet
                continue
        facts |= {" defaults": function.__defaults__, " keywords": function.__kwdefaults__}
        return id(code), self.of_all(facts, depth)

    def of_tensor(self, tensor: Tensor) -> object:
        """Kind and numbers of a tensor."""
        kind = tensor.dtype, tensor.device, tensor.shape
        return (*kind, _numbers(tensor)) if self._with_weights else kind


def _names(code: CodeType) -> Iterator[str]:
    """The names that code uses, and functions written inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _numbers(tensor: Tensor) -> object:
    """Sums of all bits along the rows and columns of a tensor, with weights; its version if it has no plain memory."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return tuple(_numbers(part) for part in parts if isinstance(part, Tensor))  # one of a DTensor is its mesh
    if not tensor.numel():
        return None
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None if tensor.is_inference() else tensor._version
    with torch.no_grad():
        own = tensor.detach()
        own = own.int_repr() if own.is_quantized else torch.view_as_real(own) if own.is_complex() else own
        wide = own.dim() > 0 and own.shape[-1] * own.element_size() % 8 == 0 and own.is_contiguous()
        bits = own.view(torch.int64 if wide else _INTEGERS[own.element_size()])
        bits = bits.reshape(-1, bits.shape[-1]) if bits.dim() else bits.reshape(1, 1)
        sums = [bits.sum(axis, dtype=torch.int64) for axis in (0, 1)]
        return tuple(int((one * torch.arange(1, len(one) + 1, device=one.device)).sum()) for one in sums)
