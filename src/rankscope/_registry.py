"""Registries of named entries, one file each, filled by importing their package."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from rankscope.errors import UnknownNameError

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A read-only mapping of names to entries, filled by the modules of one package.

    To add an entry, add a file to that package: the first lookup imports every module in it.

    Args:
        kind: the word for an entry in messages, e.g. ``"metric"``.
        package: the package whose modules call :meth:`add` when imported.
        folders: whether entries are subpackages rather than modules; plain modules are then ignored.
    """

    def __init__(self, kind: str, package: str, *, folders: bool = False) -> None:
        self._kind = kind
        self._package = package
        self._folders = folders
        self._entries: dict[str, T] = {}
        self._loaded = False

    def add(self, name: str, entry: T) -> None:
        """Register ``entry``; raises if the name is taken."""
        if name in self._entries:
            raise ValueError(f"the {self._kind} {name!r} is registered twice")
        self._entries[name] = entry

    def registered(self, name: str) -> T:
        """An entry that was already added. Does not import the package, so its own modules may call this."""
        return self._entries[name]

    def _load(self) -> None:
        if self._loaded:
            return
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__, prefix=f"{self._package}."):
            if module.ispkg or not self._folders:
                importlib.import_module(module.name)
        self._loaded = True

    def __getitem__(self, name: str) -> T:
        self._load()
        try:
            return self._entries[name]
        except KeyError:
            raise UnknownNameError(self._kind, name, self._entries) from None

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self._load()
        return len(self._entries)
