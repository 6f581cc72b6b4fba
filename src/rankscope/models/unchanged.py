"""Whether a model is still what it was when something was found out about it.

What was proven about a model object need not be proven again, until somebody changes it: trains it, writes to its
weights in whatever way, replaces a module, sets an attribute, a field of its configuration or a global variable of
the file of its classes. Only weak references are kept.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.models.wrapping import needs_all_ranks

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# Compared one by one, or without meaning here: structure is found in evaluation mode.
_LEFT_OUT = ("_parameters", "_buffers", "_modules", "training", *_HOOKS)
_SIMPLE = (int, float, str, bool, type(None), complex, bytes)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DEPTH = 4
"""How many containers or objects deep values are compared; below that, only whether they are the same."""
_FIXED = ("torch", "transformers", "accelerate")
"""Packages whose classes are taken to have no switches but attributes and configurations."""


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
        self._facts = [(weakref.ref(owner), facts) for owner, facts in _facts(model, with_weights)]

    def fits(self, model: nn.Module) -> bool:
        """Whether nothing has changed since."""
        now = list(_facts(model, self._with_weights))
        return len(now) == len(self._facts) and all(
            before() is owner and known == facts
            for (before, known), (owner, facts) in zip(self._facts, now, strict=True)
        )


def _facts(model: nn.Module, with_weights: bool) -> Iterator[tuple[nn.Module | Tensor, object]]:
    seen: dict[int, object] = {}
    """What was read, by identity; it is kept alive, so that no other object gets the same."""

    def plain(value: Any, depth: int = _DEPTH) -> object:
        """A plain value itself, what a container or an object consists of, or its identity."""
        if isinstance(value, _SIMPLE):
            return value
        if isinstance(value, Tensor):
            return id(value), _of_tensor(value, with_weights)
        if not depth or id(value) in seen or isinstance(value, (nn.Module, type)):
            return id(value)
        seen[id(value)] = value
        if isinstance(value, dict):
            return {str(key): plain(part, depth - 1) for key, part in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [plain(part, depth - 1) for part in value]
        return id(value), plain(vars(value), depth - 1) if hasattr(value, "__dict__") else None

    for name, module in model.named_modules(remove_duplicate=False):
        if needs_all_ranks(model):
            # What changed on one rank alone would let it run the model again while the others go on without it.
            yield module, name
            continue
        own = {key: plain(value) for key, value in vars(module).items() if key not in _LEFT_OUT}
        hooks = [list(map(id, vars(module)[key].values())) for key in _HOOKS]
        of_class = id(type(module)) if id(type(module)) in seen else _of_class(type(module))
        seen[id(type(module))] = type(module)
        yield module, (name, of_class, own, hooks)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield tensor, (key, _of_tensor(tensor, with_weights))


def _of_class(kind: type) -> object:
    """The forward of a class, and the plain values of the class and of the module that defines it."""
    plain: list[object] = []
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        if base.__module__.partition(".")[0] not in _FIXED:
            scopes = (vars(base), vars(sys.modules.get(base.__module__, base)))
            plain += [{key: value for key, value in scope.items() if isinstance(value, _SIMPLE)} for scope in scopes]
    return id(kind), id(getattr(kind, "forward", None)), plain


def _of_tensor(tensor: Tensor, with_weights: bool) -> object:
    """Kind and numbers of a tensor."""
    return tensor.dtype, tensor.device, tensor.shape, _numbers(tensor) if with_weights else None


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
