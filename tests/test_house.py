"""Promises about the repository itself."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

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
    texts = {path: path.read_text() for path in SOURCES}
    nodes = ((path, node) for path, text in texts.items() if f"{name}(" in text for node in ast.walk(ast.parse(text)))
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


def test_the_first_number_of_an_own_module_imports_little() -> None:
    """Each of these takes seconds; none is needed to measure a module."""
    measure = (
        "import sys, torch, rankscope as r\n"
        "layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)\n"
        "r.measure(torch.nn.TransformerEncoder(layer, 2), torch.randn(2, 8, 16))\n"
        "print(*sys.modules)"
    )
    loaded = set(in_fresh_python(measure).split())
    assert "rankscope.metrics" in loaded
    assert not loaded & {"transformers", "huggingface_hub", "torch._dynamo", "matplotlib", "typer", "scipy"}


def test_exported_names_need_no_modeling_code() -> None:
    use_all = "import sys, rankscope as r; [getattr(r, n) for n in r.__all__]; print(*sys.modules)"
    modeling = [name for name in in_fresh_python(use_all).split() if name.startswith("transformers.models.")]
    assert modeling == []


def test_no_module_hides_an_exported_function() -> None:
    """A module ``rankscope.measure`` would take the place of the function once it is imported."""
    functions = {n for n in rankscope.__all__ if callable(getattr(rankscope, n)) and n[0].islower()}
    assert functions & {p.stem for p in (ROOT / "src/rankscope").iterdir()} == set()


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


def test_every_gate_of_the_threat_model_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "threat_model.md").read_text(encoding="utf-8").partition("### Doors")[2]
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| ")]
    gates = [(door, tests) for door, gate, tests in rows[1:] if gate.strip()]
    assert len(gates) >= 20
    for door, tests in gates:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
        assert named, door
        for file, test in named:
            assert f"\ndef {test}(" in (ROOT / file).read_text(encoding="utf-8"), (file, test)


def test_changelog_has_room_for_the_next_change() -> None:
    assert re.search(r"^## \[?Unreleased\]?", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "misc"])
def test_no_drawers(name: str) -> None:
    assert name not in {p.stem for p in SOURCES} | {p.parent.name for p in SOURCES}


def test_the_way_in_named_for_contributors_is_true_and_short() -> None:
    way_in = re.findall(r"^\d\. .*`((?:src|tests)/[^`]+)`", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    assert len(way_in) == 5
    assert [name for name in way_in if not (ROOT / name).is_file()] == []
    assert sum(len((ROOT / name).read_text().splitlines()) for name in way_in) < 600


def test_the_files_that_the_readme_tells_to_read_are_few_and_short() -> None:
    named = re.findall(r"\]\((src/rankscope/[\w/]+\.py)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(named) == 5
    assert sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in named) < 1500


SAME_NAME = {
    "GaugeCallback": "one per host, each the `Callback` of its own trainer; nobody imports both without `as`",
    "Branch": "what a module call adds in a recorded pass, and its numbers, which a metric reads",
    "Tokens": "where the tokens of a stream are, and the numbers of tokens, which a metric reads",
}
"""Class names that are defined more than once, each with the reason."""


@cache
def house() -> ModuleType:
    """``scripts/house.py``, which counts."""
    spec = importlib.util.spec_from_file_location("house", ROOT / "scripts/house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@cache
def tree() -> object:
    return house().Tree(ROOT / "src")


def test_the_graph_of_modules() -> None:
    """One test, because reading all files takes longer than the questions.

    Circles count imports inside functions, for type checking only, and by registries. An import that is a string is
    followed by no editor, type checker or test for circles.
    """
    assert tree().circles(typing=True, later=True) == []
    assert tree().package_circles() == []
    assert tree().addresses() == []
    assert tree().unreachable() == [], "a module that no user reaches"
    twice = tree().twice()
    assert {name: places for name, places in twice.items() if name not in SAME_NAME} == {}
    assert set(SAME_NAME) <= set(twice), "a reason for a name that is unique"


def test_the_counting_has_teeth(tmp_path: Path) -> None:
    """A circle of each kind, a module nobody imports and a class of the same name are found."""
    package = tmp_path / "rankscope"
    package.mkdir()
    (package / "__init__.py").write_text("from rankscope import a\n")
    (package / "a.py").write_text("def late():\n    from rankscope import b\n\nclass Same: ...\n")
    (package / "b.py").write_text("if TYPE_CHECKING:\n    from rankscope import c\n\nclass Same: ...\n")
    (package / "c.py").write_text("from rankscope import a, b\n")
    (package / "alone.py").write_text("from rankscope import a\n")
    found = house().Tree(tmp_path)
    assert found.circles() == []
    assert found.circles(typing=True) == [["rankscope.b", "rankscope.c"]]
    assert found.circles(typing=True, later=True) == [["rankscope.a", "rankscope.b", "rankscope.c"]]
    assert found.unreachable() == ["rankscope.alone"]
    assert list(found.twice()) == ["Same"]


def public_modules() -> list[str]:
    """The modules that stability.md promises, and those that it documents only."""
    table = (ROOT / "docs/stability.md").read_text().partition("## Public modules")[2].partition("\n## Schemas")[0]
    return re.findall(r"^\| `(rankscope[\w.]*)` \|", table, flags=re.MULTILINE)


def documented_imports() -> set[tuple[str, str, str]]:
    """Page, module and name of everything the README, the docs and the examples import from rankscope."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    found = set()
    for page in pages:
        if page.name == "decisions.md" or "_build" in page.parts:
            continue
        made = "rankscope.verbs.loudness"  # the verb that docs/adding.md writes
        for module, names in re.findall(r"from (rankscope(?:\.\w+)*) import (\([^)]*\)|[^\n;]*)", page.read_text()):
            if module.startswith(made):
                continue
            bare = re.sub(r"#.*|[()]", "", names)
            found |= {(page.name, module, name.split(" as ")[0].strip()) for name in bare.split(",") if name.strip()}
    return found


NOT_INSTALLED = {"rankscope.monitor.hosts.composer": "composer", "rankscope.monitor.hosts.olmo_core": "olmo_core"}
"""Public modules whose host is not among the test extras, because it pins another torch."""


def test_docs_import_only_what_is_promised() -> None:
    public = public_modules()
    imports = documented_imports()
    assert imports, "no import was found in the docs: the scan is broken"
    unknown = sorted(f"{page}: {module}.{name}" for page, module, name in imports if module not in public)
    assert not unknown
    for page, module, name in imports:
        if module in NOT_INSTALLED:
            continue
        offered = importlib.import_module(module)
        if f"{module}.{name}" not in public and name != "functional":
            assert name in getattr(offered, "__all__", dir(offered)), f"{page}: {module}.{name}"


@pytest.mark.parametrize("module", public_modules())
def test_public_modules_have_what_they_promise(module: str) -> None:
    if module in NOT_INSTALLED:
        pytest.importorskip(NOT_INSTALLED[module])
    offered = importlib.import_module(module)
    for name in getattr(offered, "__all__", ()):
        assert getattr(offered, name) is not None


@pytest.mark.parametrize("script", ["dev", ".ci/run", ".ci/versions"])
def test_scripts_can_be_run(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o111


def walk_of(spec: str) -> dict[str, set[str]]:
    """Files of rankscope with a function that is given the model while ``measure`` runs, in the order of the walk.

    The model is the spec until it is loaded, and the module afterwards, when the spec is only its name. Objects are
    compared, so the name of a parameter does not matter.

    Returns:
        For each file, in which ways: ``"itself"``, or in a ``"holder"``, an object with the model as its attribute
        ``model``; ``self`` is not counted as one.
    """
    import torch

    found: dict[str, set[str]] = {}
    source = str(ROOT / "src/rankscope")
    kind = type(rankscope.load(spec).model)
    is_loaded = False

    def way(name: str, value: object) -> str | None:
        nonlocal is_loaded
        if isinstance(value, torch.nn.Module):
            is_loaded |= isinstance(value, kind)  # measure loads one model of this class
            return "itself" if isinstance(value, kind) else None
        if isinstance(value, str):
            return "itself" if value is spec and not is_loaded else None
        return "holder" if name != "self" and isinstance(getattr(value, "model", None), kind) else None

    def watch(frame: Any, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(source):
            return
        given = inspect.getargvalues(frame)
        values = [(name, given.locals.get(name)) for name in given.args]
        values += [("", value) for value in given.locals.get(given.varargs, ())]
        values += given.locals.get(given.keywords, {}).items()
        ways = {way(name, value) for name, value in values} - {None}
        if ways:
            found.setdefault(frame.f_code.co_filename.removeprefix(source + "/"), set()).update(ways)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        rankscope.measure(spec, rankscope.Inputs(sequences=2, tokens=16))
    finally:
        sys.setprofile(before)
    return found


def test_the_walk_of_a_model_through_measure_is_short() -> None:
    """On the ordinary path at most ten files pass the model on; objects that hold it add at most fourteen.

    Together these are the files one has to open to follow ``model`` from the call of ``measure`` to the last forward
    pass.
    """
    whole = walk_of("init:tiny-bert")
    del whole["verbs/calling.py"]  # it checks the arguments of every verb and reads none of them
    walk = [file for file, ways in whole.items() if "itself" in ways]
    assert walk[0] == "verbs/measure/run.py"
    assert {"models/loading/_load.py", "stream/mode.py"} <= set(walk), "the watch sees nothing, or no hooks"
    assert len(walk) <= 10, walk
    assert len(walk) < len(whole) <= 24, whole
