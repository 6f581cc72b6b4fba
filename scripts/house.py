"""Count what the shape of the code base is judged by, and print it as a row of a Markdown table.

    python scripts/house.py                    # the row for src/rankscope
    python scripts/house.py --detail           # also the names behind each count
    python scripts/house.py --source PATH      # another tree, e.g. one unpacked by `git archive`

Only the standard library is used and nothing is imported from the tree, so that old commits can be counted too.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "rankscope"
# Where a user gets in: the top-level names, the command line, and the packages whose exports stability.md promises.
ENTRANCES = (
    "",
    "__main__",
    "cli.app",
    "pytest_plugin",
    "testing",
    "blockstats",
    "errors",
    "metrics",
    "masks",
    "remedies",
    "monitor",
    "monitor.stateful",
)
# Folders of which each file is imported by the user who has the package it is for.
OPTIONAL = ("monitor.hosts", "monitor.sinks", "monitor.stateful")
# Lines that a package may have, with the packages that are counted together. A leading minus leaves a part out.
AIMS = {
    "pass_graph stream": 3800,
    "surgery": 1500,
    "models": 6000,
    "execution": 900,
    "exact_arithmetic": 2600,
    "linalg": 3400,
    "metrics": 2150,
    "masks": 1200,
    "monitor examination verbs.doctor": 7500,
    "verbs -verbs.doctor": 4600,
    "remedies": 900,
    "verdicts": 1200,
    "runs": 2000,
    "views": 900,
    "reporting": 1700,
    "cli": 1100,
    "ext.theory": 4600,
    "ext.paths": 1900,
    "ext.offload": 1200,
    "ext.sweeps": 1200,
}
ADDRESS = re.compile(r"^[a-z_][\w.]*(:[A-Za-z_]\w*)?$")


@dataclass
class Imports:
    """The modules one module imports, by when it does so."""

    running: set[str] = field(default_factory=set)
    typing: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)


class Tree:
    """The modules of one source tree, by name, with their syntax trees."""

    def __init__(self, source: Path) -> None:
        root = source / PACKAGE
        self.files = {self._name(p.relative_to(source)): p for p in sorted(root.rglob("*.py"))}
        self.text = {name: path.read_text(encoding="utf-8") for name, path in self.files.items()}
        self.parsed = {name: ast.parse(text) for name, text in self.text.items()}
        self.imports = {name: self._imports(name) for name in self.files}

    @staticmethod
    def _name(path: Path) -> str:
        return ".".join(path.with_suffix("").parts).removesuffix(".__init__")

    def nearest(self, dotted: str) -> str | None:
        """The module that ``dotted`` is, or is a name of."""
        if dotted in self.files:
            return dotted
        parent = dotted.rpartition(".")[0]
        return parent if parent in self.files else None

    def _imports(self, name: str) -> Imports:
        found = Imports()
        self._visit(self.parsed[name], name, found.running, found)
        found.typing -= found.running
        found.later -= found.running
        return found

    def _visit(self, node: ast.AST, name: str, into: set[str], found: Imports) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                into.update(m for m in map(self.nearest, targets(child)) if m is not None and m != name)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                self._visit(ast.Module(child.body, []), name, found.typing, found)
                self._visit(ast.Module(child.orelse, []), name, into, found)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                self._visit(child, name, found.later, found)
            else:
                self._visit(child, name, into, found)

    def inside(self, package: str, *, folders: bool = False) -> list[str]:
        """The modules directly inside a package, or only its folders."""
        names = [name for name in self.files if name.rpartition(".")[0] == package]
        return [name for name in names if self.files[name].name == "__init__.py"] if folders else names

    def registered(self, name: str) -> Iterator[str]:
        """Modules that ``name`` has imported for it: those of the package of a registry, or of a folder it lists."""
        for node in ast.walk(self.parsed[name]):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Registry" and len(node.args) == 2:
                package = ast.unparse(node.args[1]).replace("__package__", name.rpartition(".")[0])
                inside = package.removeprefix("f").strip("'").replace("{", "").replace("}", "")
                yield from self.inside(inside, folders=any(word.arg == "folders" for word in node.keywords))
        if "iter_modules(__path__)" in self.text[name]:
            yield from self.inside(name)

    def addresses(self) -> list[str]:
        """Strings that name a module of the package, or a function in one: imports that no tool follows."""
        found = []
        for name, tree in self.parsed.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and ADDRESS.match(node.value):
                    module = node.value.partition(":")[0]
                    near = (module, f"{PACKAGE}.{module}", f"{name}.{module}", f"{name.rpartition('.')[0]}.{module}")
                    is_named = module in self.files and not f"{name}.".startswith(f"{module}.")  # its own is no arrow
                    if is_named or (":" in node.value and any(one in self.files for one in near)):
                        found.append(f"{name}:{node.lineno}: {node.value}")
        return found

    def package_of(self, name: str) -> str:
        """The package below the top that a module is in; each extension is one."""
        parts = name.split(".")
        return ".".join(parts[1 : 3 if parts[1:2] == ["ext"] else 2]) or PACKAGE

    def package_imports(self) -> dict[str, set[str]]:
        """The packages that each package imports at any time, registrations and modules named in text included.

        The top package is left out: its names are the exports of all others, and nothing below may import them.
        """
        edges: dict[str, set[str]] = {self.package_of(name): set() for name in self.files}
        for name, imports in self.imports.items():
            for other in imports.running | imports.typing | imports.later | set(self.registered(name)):
                edges[self.package_of(name)].add(self.package_of(other))
        for entry in self.addresses():
            name, _, address = entry.split(":", 2)
            near = (address.strip().partition(":")[0], f"{PACKAGE}.{address.strip().partition(':')[0]}")
            for module in (one for one in near if one in self.files):
                edges[self.package_of(name)].add(self.package_of(module))
        return {name: others - {name, PACKAGE} for name, others in edges.items() if name != PACKAGE}

    def package_circles(self) -> list[list[str]]:
        """Groups of packages that import each other at any time."""
        edges = self.package_imports()
        return sorted(sorted(group) for group in strong_components(edges) if len(group) > 1)

    def reachable(self) -> set[str]:
        """Modules that some entrance leads to by imports of any kind or by a registry."""
        to_do = [name for name in (f"{PACKAGE}.{entrance}".rstrip(".") for entrance in ENTRANCES) if name in self.files]
        to_do += [module for folder in OPTIONAL for module in self.inside(f"{PACKAGE}.{folder}")]
        to_do += self.inside(f"{PACKAGE}.ext", folders=True)  # by the entry points of pyproject.toml
        seen: set[str] = set()
        while to_do:
            name = to_do.pop()
            if name in seen:
                continue
            seen.add(name)
            imports = self.imports[name]
            parent = name.rpartition(".")[0]
            to_do += [*imports.running, *imports.typing, *imports.later, *self.registered(name)]
            to_do += [parent] if parent in self.files else []
        return seen

    def unreachable(self) -> list[str]:
        """Modules that nobody gets to; an empty ``__init__`` does not count."""
        return sorted(n for n in self.files.keys() - self.reachable() if self.text[n].strip())

    def importers(self) -> dict[str, set[str]]:
        """The modules that import each module, whenever they do."""
        found: dict[str, set[str]] = {name: set() for name in self.files}
        for name, imports in self.imports.items():
            for other in imports.running | imports.typing | imports.later:
                found[other].add(name)
        return found

    def circles(self, typing: bool = False, later: bool = False) -> list[list[str]]:
        """Groups of modules that import each other, at run time unless more is asked for.

        What a package imports late from its own modules is not counted: a declaration in ``__init__`` leads to them,
        and they import it whatever they say.
        """
        edges = {
            name: i.running
            | (i.typing if typing else set())
            | ({other for other in i.later if not other.startswith(f"{name}.")} if later else set())
            for name, i in self.imports.items()
        }
        return sorted(sorted(group) for group in strong_components(edges) if len(group) > 1)

    def classes(self) -> dict[str, list[str]]:
        """Where each class name is defined, at the top of a module."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, tree in self.parsed.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(name)
        return dict(found)

    def twice(self) -> dict[str, list[str]]:
        """The class names defined more than once."""
        return {name: places for name, places in sorted(self.classes().items()) if len(places) > 1}

    def comments(self) -> int:
        """Lines that hold a comment and nothing else."""
        return sum(line.lstrip().startswith("#") for text in self.text.values() for line in text.splitlines())

    def lines(self) -> int:
        """All lines of all files."""
        return sum(len(text.splitlines()) for text in self.text.values())

    def lines_of(self, names: str) -> int:
        """Lines of some packages together, as ``AIMS`` names them."""
        signs = ((-1 if name.startswith("-") else 1, name.lstrip("-")) for name in names.split())
        return sum(sign * self.sizes(name)["lines"] for sign, name in signs)

    def sizes(self, part: str = "") -> dict[str, int]:
        """Files, lines, functions and classes of the modules below ``part``; of all others if it begins with ``-``."""
        inside = f"{PACKAGE}.{part.removeprefix('-')}".rstrip(".")
        names = [n for n in self.files if (n == inside or n.startswith(f"{inside}.")) != part.startswith("-")]
        nodes = [node for name in names for node in ast.walk(self.parsed[name])]
        return {
            "files": len(names),
            "lines": sum(len(self.text[name].splitlines()) for name in names),
            "functions": sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes),
            "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        }


def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Dotted names an import statement asks for; relative imports do not occur."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    else:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def strong_components(edges: dict[str, set[str]]) -> Iterator[list[str]]:
    """Strongly connected components (Kosaraju's two passes)."""
    order: list[str] = []
    reverse: dict[str, set[str]] = {name: set() for name in edges}
    for name, others in edges.items():
        for other in others:
            reverse[other].add(name)
    seen: set[str] = set()
    for start in edges:
        if start not in seen:
            seen.add(start)
            trail = [(start, iter(sorted(edges[start])))]
            while trail:
                name, others = trail[-1]
                following = next((other for other in others if other not in seen), None)
                if following is None:
                    order.append(trail.pop()[0])
                else:
                    seen.add(following)
                    trail.append((following, iter(sorted(edges[following]))))
    placed: set[str] = set()
    for start in reversed(order):
        if start not in placed:
            group, to_do = [], [start]
            placed.add(start)
            while to_do:
                name = to_do.pop()
                group.append(name)
                fresh = reverse[name] - placed
                placed |= fresh
                to_do += fresh
            yield group


def main() -> None:
    """Print the row, and what is behind it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[1] / "src")
    parser.add_argument("--detail", action="store_true", help="list the names behind each count")
    arguments = parser.parse_args()
    tree = Tree(arguments.source)
    alone = {name: next(iter(who)) for name, who in tree.importers().items() if len(who) == 1}
    running, typing = tree.circles(), [c for c in tree.circles(typing=True) if c not in tree.circles()]
    later = [c for c in tree.circles(typing=True, later=True) if c not in tree.circles(typing=True)]
    unreachable = tree.unreachable()
    idle = sum(len(tree.text[name].splitlines()) for name in unreachable)
    counts = {
        "files": f"{len(tree.files)}",
        "lines": f"{tree.lines():,}",
        "mean lines per file": f"{tree.lines() / len(tree.files):.0f}",
        "class names defined more than once": f"{len(tree.twice())}",
        "full-line comments": f"{tree.comments()}",
        "import circles (with type checking, with late imports)": f"{len(running)} (+{len(typing)}, +{len(later)})",
        "circles between packages": f"{len(tree.package_circles())}",
        "modules named in text": f"{len(tree.addresses())}",
        "unreachable modules (lines)": f"{len(unreachable)} ({idle:,})",
        "modules with one importer": f"{len(alone)}",
    }
    for row in (counts, ["---"] * len(counts), counts.values()):
        print(f"| {' | '.join(row)} |")
    print("\n| | files | lines | functions | classes |\n|---|---|---|---|---|")
    for title, part in (("core", "-ext"), ("extensions", "ext"), ("whole", "")):
        print(f"| {title} | {' | '.join(f'{count:,}' for count in tree.sizes(part).values())} |")
    print("\n| package | lines | aim | above it |\n|---|---|---|---|")
    rows = {names: (tree.lines_of(names), aim) for names, aim in AIMS.items()}
    rows["everything else"] = (tree.lines() - sum(lines for lines, _ in rows.values()), 1500)
    rows["whole"] = (tree.lines(), 52_000)
    for names, (lines, aim) in rows.items():
        print(f"| {names} | {lines:,} | {aim:,} | {lines / aim - 1:+.0%} |")
    if arguments.detail:
        print("\nClass names defined more than once:")
        for name, places in tree.twice().items():
            print(f"  {name}: {', '.join(places)}")
        for kind, circles in (("", running), (" with type checking", typing), (" with late imports", later)):
            print(f"\nImport circles{kind}:")
            for circle in circles:
                print(f"  {' '.join(circle)}")
        print("\nUnreachable:")
        for name in unreachable:
            print(f"  {name} ({len(tree.text[name].splitlines())} lines)")
        print("\nModules with one importer:")
        for name, importer in alone.items():
            print(f"  {name} ({len(tree.text[name].splitlines())} lines) <- {importer}")


if __name__ == "__main__":
    main()
