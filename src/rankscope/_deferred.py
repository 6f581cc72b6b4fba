"""Functions given as ``module:name`` and imported on first call, so that a declaration costs no import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rankscope.errors import RankscopeError


def resolve(place: str) -> Any:
    """The object at ``module:name``, with the module relative to ``rankscope``.

    Example:
        >>> resolve("views:number")(0.4567)
        '0.457'

    Raises:
        RankscopeError: the place is not written as ``module:name``.
    """
    module, colon, name = place.partition(":")
    if not (module and colon and name):
        raise RankscopeError(f"{place!r} is not a place; expected module:name, such as results.text:number.")
    return getattr(importlib.import_module(f"rankscope.{module}"), name)


def deferred(place: str) -> Callable[..., Any]:
    """A function that imports the function at ``place`` when called, and calls it.

    Example:
        >>> deferred("views:number")(0.4567)
        '0.457'
    """

    def call(*arguments: Any) -> Any:
        return resolve(place)(*arguments)

    call.__name__ = place
    return call


def names_of(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The ``__getattr__`` of a package whose names are imported on first use.

    Args:
        package: its ``__name__``.
        homes: the module that defines each public name.
    """

    def attribute(name: str) -> object:
        if name not in homes:
            known = ", ".join(sorted(homes))
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {known}")
        value: object = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return attribute
