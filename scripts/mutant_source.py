"""Mutants: one change each in the source, made by cosmic-ray's operators, and served to one process in its place."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src" / "rankscope"
SKIPPED = ("ExceptionReplacer", "RemoveDecorator", "NoOp", "VariableInserter", "VariableReplacer")
"""Not drawn: most of what they make cannot be told from the original by any call (an error nobody raises, @final)."""


@dataclass(frozen=True)
class Mutant:
    """One change: the module, its operator, which occurrence, and the line."""

    package: str
    module: str
    operator: str
    occurrence: int
    line: int


def operators() -> dict[str, Any]:
    """The operators of cosmic-ray by name."""
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    return {name: provider[name] for name in provider if name not in SKIPPED}


def place_of(package: str) -> Path:
    """The folder of a package, which may be an extension."""
    return SOURCE / package if (SOURCE / package).is_dir() else SOURCE / "ext" / package


def mutants_of(package: str) -> list[Mutant]:
    """Every mutant of a package that could make a difference."""
    from cosmic_ray.ast import get_ast

    found = []
    for path in sorted(place_of(package).rglob("*.py")):
        code = path.read_text(encoding="utf-8")
        dead = dead_lines(code)
        module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        nodes = list(walked(get_ast(code)))
        for name, kind in operators().items():
            occurrence = 0
            for node in nodes:
                for (line, column), _ in kind().mutation_positions(node):
                    if not any(first <= (line, column) < last for first, last in dead):
                        found.append(Mutant(package, module, name, occurrence, line))
                    occurrence += 1
    return found


def walked(node: Any) -> Any:
    """All nodes in the order in which cosmic-ray counts occurrences."""
    yield node
    for child in getattr(node, "children", ()):
        yield from walked(child)


def dead_lines(code: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Places that are never evaluated: annotations, and what only a type checker reads."""
    spans: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for node in ast.walk(ast.parse(code)):
        parts: list[ast.expr | ast.stmt | None] = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = [node.returns]
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            parts = [node.annotation]
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            parts = [node]
        spans += [
            ((part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0))
            for part in parts
            if part is not None
        ]
    return spans


def mutated_source(mutant: Mutant) -> tuple[Path, str]:
    """The file of a mutant and what it becomes."""
    from cosmic_ray.mutating import mutate_code

    place = SOURCE.parent / Path(*mutant.module.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    changed = mutate_code(path.read_text(encoding="utf-8"), operators()[mutant.operator](), mutant.occurrence)
    return path, changed or ""


class Changed(SourceFileLoader):
    """Loads one module from changed source."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        """The changed code; nothing is cached."""
        return compile(self._source, self.path, "exec", dont_inherit=True)


class Finder:
    """Finds the one changed module, and nothing else."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self._name, self._path, self._source = name, path, source

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The changed module's spec."""
        if name != self._name:
            return None
        loader = Changed(name, str(self._path), self._source)
        spec = spec_from_loader(name, loader, origin=str(self._path))
        if spec is not None and self._path.name == "__init__.py":
            spec.submodule_search_locations = [str(self._path.parent)]
        return spec
