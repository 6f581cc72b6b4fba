"""Extensions: packages that add verbs, commands, metrics, masks, remedies and more, and that can be left out.

An extension is an :class:`Extension` object, declared in the ``pyproject.toml`` of its package:

.. code-block:: toml

    [project.entry-points."rankscope.extensions"]
    theory = "rankscope.ext.theory:EXTENSION"

The extensions of rankscope itself are declared in the same way. They are looked up in the metadata of installed
packages, which imports nothing; what an extension adds to a registry is imported when that registry is first read.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from rankscope.errors import MissingExtensionError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "rankscope.extensions"

OURS: Mapping[str, tuple[str, ...]] = {
    "offload": ("offload", "s3://"),
    "paths": ("decompose",),
    "sweeps": ("query", "sweep"),
    "theory": ("bound", "graph", "predict", "theorems"),
}
"""What the extensions of rankscope offer, so that an error can name one that is not installed."""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What a package adds to rankscope.

    Attributes:
        name: as in the entry point.
        summary: one sentence for ``rankscope ls extensions``.
        requires: extensions without which it cannot be used. It may import these, and no others.
        adds: by the kind of a registry (``"verb"``, ``"metric"``, ``"mask"``, ``"remedy"``, ``"family"``, ``"alarm"``,
            ``"command"``, ``"listing"``, ``"section"`` of the report, ``"execution"``, ...), a function that imports
            the modules which register the entries.
        names: names under ``rankscope.``, each with a function that imports and returns the object. The functions of
            verbs need no entry.
    """

    name: str
    summary: str
    requires: tuple[str, ...] = ()
    adds: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    names: Mapping[str, Callable[[], object]] = field(default_factory=dict)


@dataclass(frozen=True)
class Installed:
    """An entry point, and what came of it.

    Attributes:
        name: the name of the entry point.
        place: the module it names.
        package: the distribution that declares it.
        extension: the extension; None if it cannot be used.
        problem: why it cannot be used.
    """

    name: str
    place: str
    package: str
    extension: Extension | None
    problem: str = ""


@cache
def installed() -> Mapping[str, Installed]:
    """All extensions that installed packages declare, by name, with those that cannot be used."""
    points = {point.name: (point, package) for package, point in _entry_points()}
    read = {name: _read(point, package) for name, (point, package) in sorted(points.items())}
    for _ in read:  # an extension whose requirement has a missing requirement goes too
        for name, one in read.items():
            lacking = [n for n in one.extension.requires if not _usable(read, n)] if one.extension else []
            if lacking:
                why = f"needs the extension {lacking[0]}, which is not installed"
                read[name] = Installed(one.name, one.place, one.package, None, why)
    for one in read.values():
        if one.problem and one.name not in OURS:  # ours may be left out on purpose; errors name them
            warnings.warn(f"The rankscope extension {one.name} ({one.package}) {one.problem}.", stacklevel=2)
    return MappingProxyType(read)


def _usable(read: Mapping[str, Installed], name: str) -> bool:
    return name in read and read[name].extension is not None


def available() -> Iterator[Extension]:
    """The extensions that can be used, in the order of their names."""
    return (one.extension for one in installed().values() if one.extension is not None)


def _read(point: EntryPoint, package: str) -> Installed:
    try:
        extension = point.load()
    except ModuleNotFoundError as error:
        is_gone = error.name is not None and f"{point.module}.".startswith(f"{error.name}.")
        why = "is not installed" if is_gone else f"cannot be imported: {error}"
        return Installed(point.name, point.module, package, None, why)
    except Exception as error:  # noqa: BLE001 code of others: it must not take every command with it
        return Installed(point.name, point.module, package, None, f"cannot be imported: {error!r}")
    if not isinstance(extension, Extension) or extension.name != point.name:
        return Installed(point.name, point.module, package, None, f"declares {point.value}, which is not its Extension")
    return Installed(point.name, point.module, package, extension)


def _entry_points() -> Iterator[tuple[str, EntryPoint]]:
    """Entry points of our group with their distribution; a name of rankscope's own is not replaced by another's."""
    from importlib.metadata import (  # 50 ms, which `import rankscope` need not pay
        DistributionFinder,
        MetadataPathFinder,
    )

    found: dict[str, tuple[str, EntryPoint]] = {}
    for distribution in MetadataPathFinder.find_distributions(DistributionFinder.Context(path=_places(sys.path))):
        for point in distribution.entry_points:
            if point.group == GROUP and (point.name not in found or point.module.startswith("rankscope.")):
                found[point.name] = (distribution.name, point)
    return iter(found.values())


def _places(path: Sequence[str]) -> list[str]:
    """Where installed packages are, without the working directory that ``python -m`` and ``python -c`` put first.

    A folder that somebody sends must not add code to the program that reads it.
    """
    first = path[:1] if path and path[0] in ("", os.getcwd()) else []
    return [place for place in path[len(first) :] if place not in ("", ".")]


_FILLS: dict[str, list[Callable[[], object]]] = {}


def filled_by(kind: str, load: Callable[[], object]) -> None:
    """Let ``load`` fill the registry of this kind when it is first read.

    The registry may be in a layer below the one that ``load`` imports: only the package as a whole knows both.
    """
    _FILLS.setdefault(kind, []).append(load)


def contribute(kind: str) -> None:
    """Import everything that adds to the registry of this kind."""
    for load in _FILLS.get(kind, ()):
        load()
    for extension in available():
        if kind in extension.adds:
            extension.adds[kind]()


def missing(name: str) -> MissingExtensionError | None:
    """The error for a name that comes with an extension which cannot be used; None for any other name."""
    for extension, names in OURS.items():
        if name in names and not _usable(installed(), extension):
            one = installed().get(extension)
            return MissingExtensionError(name, extension, one.problem if one is not None else "is not installed")
    return None
