"""Whether a model is still what it was when something was found out about it.

What was proven about a model object need not be proven again, until somebody changes it: trains it, replaces a module,
sets an attribute or a field of its configuration. Only weak references are kept. Numbers written through ``.data``
are not noticed; they change no structure.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_LEFT_OUT = ("_parameters", "_buffers", "_modules", "training")
"""Attributes of modules that are compared one by one, or that say nothing: structure is found in evaluation mode."""
_SIMPLE = (int, float, str, bool, type(None), complex, bytes)


class Snapshot:
    """What decides how a model computes, at one moment.

    Args:
        model: the model.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> before = Snapshot(model)
        >>> before.fits(model)
        True
        >>> _ = nn.init.zeros_(model.bias)
        >>> before.fits(model)
        False
    """

    def __init__(self, model: nn.Module) -> None:
        found = list(_facts(model))
        self._objects = [weakref.ref(owner) for owner, _ in found]
        self._facts = [facts for _, facts in found]

    def fits(self, model: nn.Module) -> bool:
        """Whether nothing has changed since."""
        found = list(_facts(model))
        if len(found) != len(self._facts):
            return False
        known = zip(self._objects, self._facts, found, strict=True)
        return all(reference() is owner and before == facts for reference, before, (owner, facts) in known)


def _facts(model: nn.Module) -> Iterator[tuple[nn.Module | Tensor, object]]:
    for name, module in model.named_modules(remove_duplicate=False):
        own = {key: value for key, value in vars(module).items() if key not in _LEFT_OUT}
        yield module, (name, type(module), type(module).forward, _simple(own))
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                version = None if tensor.is_inference() else tensor._version
                yield tensor, (key, version, tensor.dtype, tensor.device, tensor.shape)


def _simple(values: dict[str, Any], depth: int = 2) -> tuple[object, ...]:
    """Plain values as they are, fields of other objects to some depth, and the identity of everything else."""
    found: list[object] = []
    for key, value in values.items():
        if isinstance(value, _SIMPLE):
            found.append((key, value))
        elif isinstance(value, (list, tuple, set, frozenset, dict)) and depth:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            found.append((key, _simple({str(place): item for place, item in items}, depth - 1)))
        elif hasattr(value, "__dict__") and depth and not isinstance(value, (nn.Module, Tensor, type)):
            found.append((key, id(value), _simple(vars(value), depth - 1)))
        else:
            found.append((key, id(value)))
    return tuple(found)
