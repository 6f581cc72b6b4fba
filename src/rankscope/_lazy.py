"""Names of a package that are imported on first use, as declared by its imports for type checkers.

A package lists its public names once, as ordinary imports under ``if TYPE_CHECKING:``. Type checkers and editors follow
them; at run time they cost nothing until a name is used.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import linecache
import sys
from collections.abc import Callable, Iterator


def names_of(package: str) -> Callable[[str], object]:
    """The ``__getattr__`` of a package: imports a name from the module that its type-checking imports name.

    Args:
        package: its ``__name__``.
    """
    homes: dict[str, tuple[str, str]] = {}

    def attribute(name: str) -> object:
        if not homes:
            homes.update(declared_in(_source(package)))
        if name not in homes:
            near = difflib.get_close_matches(name, homes, n=3, cutoff=0.6)
            known = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"It has {', '.join(sorted(homes))}."
            raise AttributeError(f"module {package!r} has no attribute {name!r}. {known}", name=name)
        module, original = homes[name]
        value: object = getattr(importlib.import_module(module), original)
        setattr(sys.modules[package], name, value)
        return value

    return attribute


def declared_in(source: str) -> Iterator[tuple[str, tuple[str, str]]]:
    r"""The imports under ``if TYPE_CHECKING:`` at the top of a module: each name, with its module and its name there.

    Example:
        >>> dict(declared_in("if TYPE_CHECKING:\n    from rankscope.views import number as n"))
        {'n': ('rankscope.views', 'number')}
    """
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for line in node.body:
                if isinstance(line, ast.ImportFrom) and line.module is not None:
                    yield from ((one.asname or one.name, (line.module, one.name)) for one in line.names)


def _source(package: str) -> str:
    module = sys.modules[package]
    lines = linecache.getlines(str(module.__file__), module.__dict__)  # finds it in a zip archive too
    if not lines:
        raise ImportError(f"{package} was installed without its source files, from which its names are read.")
    return "".join(lines)
