"""Do the tests bite? Change one thing in the source at a time, and see whether a test notices.

Mutants are made by cosmic-ray's operators; annotations and docstrings are left alone, since nothing evaluates them. A
sample is drawn from each package. A mutant is tried by the tests of its package first (the file that bears the module's
name before the others), then by wider ones; it is killed when one fails or nothing ends in time. Survivors are written
down to be judged by a person in ``docs/data/mutants.json``; what was judged before is kept::

    pip install cosmic-ray
    python scripts/mutants.py --each 40            # per package; hours on one core
    python scripts/mutants.py --each 5 metrics
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "rankscope"
FIGURES = ROOT / "docs" / "data" / "mutants.json"
WIDER = {
    "linalg": ("tests/metrics", "tests/contracts/test_metrics.py", "tests/theory/test_contraction.py"),
    "metrics": ("tests/contracts/test_metrics.py", "tests/linalg"),
    "theory": ("tests/contracts/test_theorems.py", "tests/verbs"),
    "masks": ("tests/contracts/test_masks.py", "tests/surgery/test_operating.py"),
    "deviation": ("tests/verbs",),
    "paths": ("tests/verbs",),
    "stream": ("tests/surgery", "tests/verbs", "tests/contracts/test_surgery.py"),
    "surgery": ("tests/contracts/test_surgery.py", "tests/verbs", "tests/remedies"),
}
SECONDS = 300
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


def mutants_of(package: str) -> list[Mutant]:
    """Every mutant of a package that could make a difference."""
    from cosmic_ray.ast import get_ast

    found = []
    for path in sorted((SOURCE / package).rglob("*.py")):
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


def tried(mutant: Mutant) -> str:
    """``"killed"``, ``"timeout"``, ``"survived"`` or ``"same"`` (no change), in a process of its own."""
    path, source = mutated_source(mutant)
    if not source or ast.dump(ast.parse(source)) == ast.dump(ast.parse(path.read_text(encoding="utf-8"))):
        return "same"
    for stage in stages(mutant, path):
        child = os.fork()
        if child == 0:
            os._exit(_test(mutant.module, path, source, stage))
        ended = _waited(child)
        if ended != 0:
            return "timeout" if ended < 0 else "killed"
    return "survived"


def refuse_false_kills(package: str) -> None:
    """The tests must pass on source that is served the same way and not changed."""
    path = SOURCE / package / "__init__.py"
    mutant = Mutant(package, f"rankscope.{package}", "", 0, 0)
    for stage in stages(mutant, path):
        child = os.fork()
        if child == 0:
            os._exit(_test(mutant.module, path, path.read_text(encoding="utf-8"), stage))
        if _waited(child) != 0:
            raise SystemExit(f"The tests of {package} fail, or take more than {SECONDS} s, without any change: {stage}")


def stages(mutant: Mutant, path: Path) -> list[list[str]]:
    """The package's own tests, nearest first; then wider ones."""
    home = ROOT / "tests" / mutant.package
    word = path.stem.strip("_")
    files = sorted(home.rglob("test_*.py"), key=lambda file: (word not in file.stem, file.name))
    return [[str(file) for file in files], [str(ROOT / place) for place in WIDER[mutant.package]]]


def _test(module: str, path: Path, source: str, tests: list[str]) -> int:
    import pytest

    out = os.open(os.devnull, os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(ROOT)
    sys.meta_path.insert(0, Finder(module, path, source))
    return int(pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]) != 0)


def _waited(child: int) -> int:
    """Exit code; -1 when it was killed for taking too long."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) & 0xFF
        time.sleep(0.2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def main() -> None:
    """Draw, try, write down after each mutant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help=f"of {', '.join(WIDER)}; all by default")
    parser.add_argument("--each", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import torch  # noqa: F401 - imported once here, so that the forked children need not
    import transformers.models.bert.modeling_bert  # noqa: F401

    facts = json.loads(FIGURES.read_text()) if FIGURES.exists() else {"tried": []}
    done = {tuple(one[name] for name in Mutant.__dataclass_fields__) for one in facts["tried"]}
    drawn: list[Mutant] = []
    for package in options.packages or WIDER:
        every = mutants_of(package)
        facts.setdefault("possible", {})[package] = len(every)
        drawn += random.Random(f"{package}:{options.seed}").sample(every, min(options.each, len(every)))
    random.Random(options.seed).shuffle(drawn)
    for package in options.packages or WIDER:
        refuse_false_kills(package)
    for mutant in drawn:
        if tuple(asdict(mutant).values()) not in done:
            outcome = tried(mutant)
            facts["tried"].append({**asdict(mutant), "outcome": outcome, "judged": ""})
            facts["date"] = date.today().isoformat()
            FIGURES.write_text(json.dumps(facts, indent=1) + "\n")
            print(outcome, mutant, flush=True)


if __name__ == "__main__":
    main()
