"""Views of several blocks as one.

On an accelerator a small operation takes as long to launch as a large one. So the views of several blocks wait, and the
metrics are evaluated on all of them together, as if they were one batch. Views of small activations wait with a copy of
them (:meth:`Joinable.held`); those of large ones are stripped of their activations once the reductions are taken.

A view takes part by two declarations: ``activations``, the attributes that hold tensors as large as what was observed,
and ``reductions``, the cached properties that are computed from them. Everything else that it caches follows from
these. Tensors have the sequences (or matrices) as their first axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

V = TypeVar("V", bound="Joinable")


class ActivationsGoneError(AttributeError):
    """A stripped view was asked for its activations."""


class Joinable:
    """Base of the views.

    Attributes:
        batch_shape: the batch axes (and the heads) of the values.
    """

    activations: ClassVar[frozenset[str]] = frozenset()
    reductions: ClassVar[frozenset[str]] = frozenset()
    batch_shape: tuple[int, ...]

    def __getattr__(self, name: str) -> Any:
        """Only for attributes that do not exist."""
        if name in type(self).activations:
            raise ActivationsGoneError(f"{type(self).__name__} was stripped of {name}.")
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}.")

    @property
    def home(self) -> torch.device:
        """Where its tensors are."""
        return next(tensor.device for _, tensor in _tensors(self))

    def computed(self) -> frozenset[str]:
        """The reductions that were computed so far."""
        return self.reductions & self.__dict__.keys()

    def taken(self) -> frozenset[str]:
        """Those of them that the others, and everything else that was asked for, follow from."""
        return self.computed()

    def stripped(self: V, reductions: frozenset[str]) -> V:
        """The same view with these reductions and no activations."""
        for name in reductions:
            getattr(self, name)
        found = object.__new__(type(self))
        for name, value in self.__dict__.items():
            if name in reductions or not (name in self.activations or _is_cached(type(self), name)):
                found.__dict__[name] = value.stripped(frozenset()) if isinstance(value, Joinable) else value
        return found

    def held(self: V) -> V:
        """The same view with a copy of its activations, which the model may overwrite, and nothing computed yet."""
        found = object.__new__(type(self))
        for name, value in self.__dict__.items():
            if isinstance(value, Joinable):
                found.__dict__[name] = value.held()
            elif not _is_cached(type(self), name):
                copied = name in self.activations and value is not None
                found.__dict__[name] = value.clone() if copied else value
        return found

    @property
    def keeps_bits(self) -> bool:
        """Whether bits on a CPU depend neither on the number of threads nor on what the view is joined with."""
        return all(value.keeps_bits for value in self.__dict__.values() if isinstance(value, Joinable))

    @property
    def entries_held(self) -> int:
        """Number of entries of the tensors that it would wait with."""
        return sum(tensor.numel() for _, tensor in _tensors(self))

    @property
    def bytes_held(self) -> int:
        """Memory of the tensors of a stripped view."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in _tensors(self))

    @property
    def likeness(self) -> tuple[Any, ...]:
        """Equal for stripped views that can be joined: everything but the sizes of their first axes."""
        return tuple((name, tuple(t.shape[1:]), t.dtype, t.device) for name, t in _tensors(self)), *_constants(self)

    @classmethod
    def joined(cls: type[V], views: Sequence[V]) -> V:
        """One view of all their sequences."""
        first = views[0]
        found = object.__new__(cls)
        for name in first.__dict__:
            found.__dict__[name] = _joined(name, [view.__dict__[name] for view in views])
        return found


_ADDED = frozenset({"sequences"})


def _is_cached(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), cached_property)


_WHOLE = (Tensor, int, float, str, torch.dtype, torch.device)


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """The named parts of a view, a dataclass or a tuple of tensors; None for anything else."""
    if value is None or isinstance(value, _WHOLE):  # most values, for which the questions below take longer
        return None
    if isinstance(value, Joinable):
        return sorted(value.__dict__.items())
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, tuple) and any(_parts(part) is not None or isinstance(part, Tensor) for part in value):
        return [(str(place), part) for place, part in enumerate(value)]
    return None


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    for name, part in _parts(value) or ():
        yield from _tensors(part, f"{path}.{name}")


def _constants(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    parts = _parts(value)
    if parts is not None:
        for name, part in parts:
            if name not in _ADDED:
                yield from _constants(part[1:] if name == "batch_shape" else part, f"{path}.{name}")
    elif not isinstance(value, Tensor):
        yield path, value


def _joined(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if name in _ADDED:
        return sum(values)
    if name == "batch_shape":
        return (sum(shape[0] for shape in values), *first[1:])
    if isinstance(first, Tensor):
        return torch.cat(list(values)) if len(values) > 1 else first
    if isinstance(first, Joinable):
        return type(first).joined(values)
    parts = _parts(first)
    if parts is None:
        return first
    together = [_joined(part, [dict(_parts(value) or ())[part] for value in values]) for part, _ in parts]
    return tuple(together) if type(first) is tuple else type(first)(*together)
