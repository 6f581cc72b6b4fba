"""Promises about the repository itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rankscope

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".cff", ".bib", ".json", ".yml", ".yaml", ".cfg", ".svg", ""}

# Split so that this file does not hold what it looks for.
MACHINE_PATHS = [rf"(?<![\w.\-/~])/{top}/\w" for top in ("work", "root", "opt", "home", "Users", "mnt")]
REGISTRY_HOSTS = [
    "py" + r"pi\.org",
    "registry" + r"\.npm",
    "files\\.python" + "hosted",
    "down" + r"load\.pytorch\.org",
    "art" + "ifactory",
]
FORBIDDEN = re.compile("|".join(MACHINE_PATHS + REGISTRY_HOSTS))


def tracked_files() -> list[Path]:
    """Files git tracks or would add, skips outside a checkout."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in listing.stdout.splitlines() if (ROOT / line).is_file()]


def in_fresh_python(code: str) -> str:
    """Standard output of ``code`` in an interpreter of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def project_table() -> dict[str, object]:
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def calls_of(name: str) -> list[tuple[Path, ast.Call]]:
    """Every call ``name(...)`` in the sources."""
    nodes = ((path, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text())))
    return [
        (path, node)
        for path, node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def bib_keys() -> set[str]:
    return set(re.findall(r"^@\w+\{([^,\s]+),", (ROOT / "docs/references.bib").read_text(), flags=re.MULTILINE))


def test_license_text_and_metadata_agree() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert project_table()["license"] == "Apache-2.0"
    assert "license: Apache-2.0" in (ROOT / "CITATION.cff").read_text()


def test_version_is_one() -> None:
    assert f"version: {rankscope.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_every_exported_name_exists() -> None:
    for name in rankscope.__all__:
        assert getattr(rankscope, name) is not None
    assert set(rankscope.__all__) <= set(dir(rankscope))


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known() -> None:
    with pytest.raises(AttributeError, match="measure"):
        _ = rankscope.mesure


def test_import_is_lazy() -> None:
    heavy = in_fresh_python("import sys, rankscope; print(sorted({m.split('.')[0] for m in sys.modules}))")
    for package in ("torch", "transformers", "numpy", "pyarrow", "matplotlib"):
        assert f"'{package}'" not in heavy


def test_exported_names_need_no_modeling_code() -> None:
    use_all = "import sys, rankscope as r; [getattr(r, n) for n in r.__all__]; print(*sys.modules)"
    modeling = [name for name in in_fresh_python(use_all).split() if name.startswith("transformers.models.")]
    assert modeling == []


def test_no_module_bears_the_name_of_an_exported_function() -> None:
    functions = {n for n in rankscope.__all__ if callable(getattr(rankscope, n)) and n[0].islower()}
    assert functions & {p.stem for p in SOURCES} == set()


def test_no_machine_paths_or_registry_hosts() -> None:
    hits = []
    for path in tracked_files():
        if path.suffix in TEXT_SUFFIXES:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if FORBIDDEN.search(line):
                    hits.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("line", ["cd /" + "work/main", "see https://py" + "pi.org/simple", "'/" + "opt/wheels'"])
def test_the_scan_has_teeth(line: str) -> None:
    assert FORBIDDEN.search(line)


def test_every_citation_has_an_entry() -> None:
    keys = {(path, call.args[0].value) for path, call in calls_of("Cite") if isinstance(call.args[0], ast.Constant)}
    assert keys, "no Cite(...) was found in src: the scan is broken"
    missing = sorted({f"{key} ({path.name})" for path, key in keys if key not in bib_keys()})
    assert not missing


def test_every_extra_named_in_an_error_exists() -> None:
    extras = project_table()["optional-dependencies"]
    calls = [call for _, call in calls_of("MissingExtraError")]
    named = {
        word.value for call in calls for word in (*call.args[2:], *(k.value for k in call.keywords if k.arg == "extra"))
    }
    named |= {m for path in SOURCES for m in re.findall(r"rankscope\[(\w+)\]", path.read_text())}
    assert named, "no extra is named in src: the scan is broken"
    assert named <= set(extras)


def test_changelog_has_room_for_the_next_change() -> None:
    assert re.search(r"^## \[?Unreleased\]?", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "misc"])
def test_no_drawers(name: str) -> None:
    assert name not in {p.stem for p in SOURCES} | {p.parent.name for p in SOURCES}


def test_the_way_in_named_by_the_readme_is_true() -> None:
    way_in = re.findall(r"^\d\. .*`((?:src|tests)/[^`]+)`", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert len(way_in) == 5
    assert [name for name in way_in if not (ROOT / name).is_file()] == []
    assert sum(len((ROOT / name).read_text().splitlines()) for name in way_in) < 600


@pytest.mark.parametrize("script", ["dev", ".ci/run", ".ci/versions"])
def test_scripts_can_be_run(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o111
