"""Tensors known by the object that they are, and tensors inside nested arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Found = TypeVar("Found")


class ByTensor(Generic[Found]):
    """One value for each of some tensor objects, as long as they live; no tensor is kept alive.

    Python gives the id of an object that is gone to a later one, so an entry counts only if its weak reference still
    leads to the tensor that is asked for.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Tensor], Found]] = {}

    def __setitem__(self, tensor: Tensor, value: Found) -> None:
        self._held[id(tensor)] = (weakref.ref(tensor), value)

    def __contains__(self, candidate: object) -> bool:
        entry = self._held.get(id(candidate))
        return entry is not None and entry[0]() is candidate

    def get(self, candidate: object) -> Found | None:
        """The value of this exact object; None if it has none."""
        entry = self._held.get(id(candidate))
        return entry[1] if entry is not None and entry[0]() is candidate else None

    def copied(self) -> ByTensor[Found]:
        """The same values for the same tensors, to be changed apart."""
        other = ByTensor[Found]()
        other._held = dict(self._held)
        return other

    def drop(self, tensor: Tensor) -> None:
        """Forget the value of a tensor, if it has one."""
        self._held.pop(id(tensor), None)

    def clear(self) -> None:
        """Forget all values."""
        self._held.clear()

    def drop_where(self, unwanted: Callable[[Found], bool]) -> None:
        """Forget some of the values."""
        self._held = {key: entry for key, entry in self._held.items() if not unwanted(entry[1])}


def mapped(given: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Arguments with everything of one kind replaced, however deep it is in lists, tuples and dicts."""
    # Every operation of a pass comes here, and tree_map of torch.utils._pytree takes twice as long.
    if isinstance(given, kind):
        return change(given)
    if isinstance(given, (tuple, list)):
        items = [mapped(item, kind, change) for item in given]
        return type(given)(*items) if hasattr(given, "_fields") else type(given)(items)
    if isinstance(given, Mapping):
        return {name: mapped(item, kind, change) for name, item in given.items()}
    return given


def inside(given: Any, kind: type) -> list[Any]:
    """Everything of one kind in lists, tuples and dicts, in order."""
    found: list[Any] = []
    mapped(given, kind, found.append)
    return found


def memory_of(tensor: Tensor) -> int | None:
    """Identifies the memory of a tensor; None for tensors without plain memory (sparse ones, other subclasses)."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    storage = tensor.untyped_storage()
    try:
        return int(storage.data_ptr() or storage._cdata)  # meta tensors have no memory: use the storage object
    except RuntimeError:
        return None  # torch.func.jvp hands out tensors whose storage has no address
