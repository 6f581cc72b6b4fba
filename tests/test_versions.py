"""The versions that the metadata promises are those that were tried."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from scripts.write_versions import CORE, DATA, EXTRAS, TABLE, table

ROOT = Path(__file__).resolve().parents[1]
WITH_OTHERS = {"latex2mathml", "trackio", "wandb", "mlflow"}
"""Extras that were not installed beside the oldest of all others; they need newer ones."""
BESIDE = {"torch", "transformers", "safetensors"}
"""Older ones than in the oldest set work for the commands that do not need the newer ones."""
OLDEST_SYNTAX = (3, 10)


def requirements(lines: list[str]) -> dict[str, str]:
    """Lower bound of each package; the extras of rankscope itself are left out."""
    found = (re.fullmatch(r"([\w.-]+)>=([\d.]+)", line) for line in lines)
    return {match[1].lower(): match[2] for match in found if match}


def project() -> dict[str, object]:
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def bounds() -> dict[str, str]:
    """Lower bounds of what a user installs."""
    table = project()
    users = (
        lines for extra, lines in table["optional-dependencies"].items() if extra not in ("test", "test-all", "docs")
    )
    return requirements(table["dependencies"]) | requirements([line for lines in users for line in lines])


def oldest() -> dict[str, str]:
    """The pins of the oldest set."""
    lines = (ROOT / "constraints/oldest.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.lower().split("==") for line in lines if "==" in line)


def numbers(version: str) -> tuple[int, ...]:
    """2.6, 2.6.0 and 2.6.0.0 are one version."""
    parts = [int(part) for part in version.split(".")]
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def test_every_lower_bound_is_in_the_oldest_set() -> None:
    pins = oldest()
    assert {name for name in bounds() if name not in pins} == WITH_OTHERS
    tried = {name: bound for name, bound in bounds().items() if name in pins and name not in BESIDE}
    assert {name: numbers(pins[name]) for name in tried} == {name: numbers(bound) for name, bound in tried.items()}


def test_what_was_recorded_is_what_is_promised() -> None:
    rows = {row["set"]: row for row in json.loads(DATA.read_text(encoding="utf-8"))}
    versions = rows["oldest"]["versions"]
    assert set(versions) == {*CORE, *EXTRAS} == set(bounds()) - WITH_OTHERS
    assert {name: numbers(versions[name]) for name in versions} == {name: numbers(oldest()[name]) for name in versions}
    promised = re.fullmatch(r">=(\d+)\.(\d+)", str(project()["requires-python"]))
    assert promised is not None
    assert rows["oldest"]["python"].split(".")[:2] == list(promised.groups())
    assert all(row["failed"] == 0 and row["passed"] > 0 for row in rows.values())


def test_the_table_of_the_docs_is_of_the_data() -> None:
    assert TABLE.read_text(encoding="utf-8") == table(json.loads(DATA.read_text(encoding="utf-8")))


def test_every_file_is_written_in_the_oldest_python() -> None:
    tops = ("src", "tests", "scripts", "examples", "benchmarks")
    for path in (path for top in tops for path in sorted((ROOT / top).rglob("*.py"))):
        ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=OLDEST_SYNTAX)


LATER = {
    "typing": {
        *("Self", "Never", "LiteralString", "Required", "NotRequired", "TypeVarTuple", "Unpack", "override", "TypeIs"),
        *("assert_never", "assert_type", "dataclass_transform", "reveal_type", "ReadOnly", "TypeAliasType"),
    },
    "datetime": {"UTC"},
    "enum": {"StrEnum", "ReprEnum", "member", "nonmember", "verify"},
    "contextlib": {"chdir"},
    "hashlib": {"file_digest"},
    "itertools": {"batched"},
    "math": {"cbrt", "exp2", "sumprod"},
    "operator": {"call"},
    "inspect": {"getmembers_static", "markcoroutinefunction"},
    "tomllib": {"load", "loads"},
}
"""Names of the standard library that Python 3.10 does not have: an import of one breaks the package there."""


def newer_names(code: str) -> set[str]:
    """Those that a file imports; names under ``if TYPE_CHECKING`` count too, as no file needs one."""
    imports = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom))
    found = ((str(node.module), one.name) for node in imports for one in node.names)
    return {f"{module}.{name}" for module, name in found if name in LATER.get(module, ())}


def test_no_module_imports_a_name_that_the_oldest_python_lacks() -> None:
    files = sorted((ROOT / "src").rglob("*.py"))
    found = {path.name: newer_names(path.read_text(encoding="utf-8")) for path in files}
    assert {name: names for name, names in found.items() if names} == {}
    assert newer_names("from typing import Any, Self") == {"typing.Self"}


def test_that_check_has_teeth() -> None:
    with pytest.raises(SyntaxError):
        ast.parse("try:\n    pass\nexcept* ValueError:\n    pass\n", feature_version=OLDEST_SYNTAX)


def test_the_folders_of_tests_that_both_ends_run_exist() -> None:
    script = (ROOT / ".ci/versions").read_text(encoding="utf-8")
    parts = re.search(r"^parts=\((.*)\)$", script, re.MULTILINE)
    assert parts is not None
    assert [part for part in parts[1].split() if not (ROOT / "tests" / part).is_dir()] == []
