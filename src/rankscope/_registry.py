"""Registries of named entries, one file each, filled by importing their package and asking extensions."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from rankscope._printing import shortened
from rankscope.errors import UnknownNameError
from rankscope.extensions import contribute, missing

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A read-only mapping of names to entries, filled by the modules of one package and by extensions.

    To add an entry, add a file to that package: the first lookup imports every module in it. Another package adds
    entries of this kind through its :class:`~rankscope.extensions.Extension`.

    Args:
        kind: the word for an entry in messages, e.g. ``"metric"``.
        package: the package whose modules call :meth:`add` when imported; None if only others fill it.
        folders: whether entries are subpackages rather than modules; plain modules are then ignored.
    """

    def __init__(self, kind: str, package: str | None = None, *, folders: bool = False) -> None:
        self._kind = kind
        self._package = package
        self._folders = folders
        self._entries: dict[str, T] = {}
        self._asked = self._loaded = False

    def add(self, name: str, entry: T) -> None:
        """Register ``entry``; raises if the name is taken."""
        if name in self._entries:
            raise ValueError(f"the {self._kind} {name!r} is registered twice")
        self._entries[name] = entry

    def registered(self, name: str) -> T:
        """An entry that was already added. Does not import the package, so its own modules may call this."""
        return self._entries[name]

    def load(self) -> None:
        """Import everything that adds entries, unless that was done."""
        if self._loaded:
            return
        if self._package is not None:
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__, prefix=f"{self._package}."):
                if module.ispkg or not self._folders:
                    importlib.import_module(module.name)
        if self._asked:  # an extension looks up entries while it adds its own
            return
        self._asked = True
        try:
            contribute(self._kind)
            self._loaded = True
        finally:
            self._asked = False

    def __getitem__(self, name: str) -> T:
        self.load()
        try:
            return self._entries[name]
        except KeyError:
            raise missing(name) or UnknownNameError(self._kind, name, self._entries) from None

    def __contains__(self, name: object) -> bool:
        self.load()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self.load()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self.load()
        return len(self._entries)

    def __repr__(self) -> str:
        return shortened(f"<{len(self)} entries of kind {self._kind}: {', '.join(self)}>")
