"""Extensions are found by entry points, can be deleted one by one, and are imported by nobody outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rankscope
from rankscope import extensions
from rankscope.extensions import GROUP, OURS, Extension, installed
from rankscope.verbs._spec import VERBS
from tests.test_house import project_table, tree

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.name for path in (ROOT / "src/rankscope/ext").iterdir() if (path / "__init__.py").is_file())


def imports_between() -> set[tuple[str, str]]:
    """Pairs of packages of which the first imports the second at any time, extensions apart."""
    return {
        (tree().package_of(name), tree().package_of(other))
        for name, imports in tree().imports.items()
        for other in imports.running | imports.typing | imports.later
    }


def test_nothing_outside_imports_an_extension_and_an_extension_only_those_it_requires() -> None:
    pairs = imports_between()
    assert {pair for pair in pairs if pair[1].startswith("ext.") and not pair[0].startswith("ext")} == set()
    assert any(pair[0].startswith("ext.") for pair in pairs), "the scan sees no extension"
    for first, second in pairs:
        if first != second and first.startswith("ext.") and second.startswith("ext."):
            assert second.removeprefix("ext.") in installed()[first.removeprefix("ext.")].extension.requires


def test_ours_are_declared_like_those_of_others() -> None:
    declared = project_table()["entry-points"][GROUP]
    assert declared == {name: f"rankscope.ext.{name}:EXTENSION" for name in FOLDERS}
    assert set(FOLDERS) == set(OURS) <= set(installed())


def test_the_table_of_our_names_is_the_declared_one() -> None:
    """It is what errors are made of when an extension is not there to be asked."""
    from rankscope.cli.app import command_line
    from rankscope.cli.commands import COMMANDS
    from rankscope.cli.listing import LISTINGS

    command_line()
    place = {name: verb.run.__module__ for name, verb in VERBS.items()}
    place |= {name: getattr(one.run, "__module__", "") for name, one in COMMANDS.items() if name != "sweep"}
    place |= {name: one.entries.__module__ for name, one in LISTINGS.items() if name not in ("masks", "verbs")}
    for name in FOLDERS:
        extension = installed()[name].extension
        offered = {entry for entry, module in place.items() if module.startswith(f"rankscope.ext.{name}.")}
        assert {*extension.names, *offered} <= set(OURS[name]), name
    for names in OURS.values():
        for name in names:
            known = (
                name in place or hasattr(rankscope, name) or name in ("sweep", "offload", "hub:", "https://", "s3://")
            )
            assert known, name


def declare(folder: Path, name: str, place: str, package: str) -> None:
    """Metadata of an installed package with one extension."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {place}\n")


PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
from rankscope.extensions import installed
one = installed().get("guest")
print(None if one is None else one.problem or one.extension.summary, "guest_module" in sys.modules)
"""


def answer_in(folder: Path, *path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_package_of_somebody_else_is_found_and_the_working_directory_is_not(tmp_path: Path) -> None:
    declare(tmp_path, "guest", "guest_module:EXTENSION", "guest")
    module = tmp_path / "guest_module.py"
    module.write_text(
        "from rankscope.extensions import Extension\nEXTENSION = Extension(name='guest', summary='Hello.')\n"
    )
    assert answer_in(tmp_path) == "None False"
    assert answer_in(ROOT, tmp_path) == "Hello. True"
    module.write_text("raise RuntimeError('broken')\n")
    assert answer_in(ROOT, tmp_path) == "cannot be imported: RuntimeError('broken') False"
    module.write_text("EXTENSION = 1\n")
    assert "is not its Extension" in answer_in(ROOT, tmp_path)
    module.write_text(
        "from rankscope.extensions import Extension\n"
        "EXTENSION = Extension(name='guest', summary='Hello.', requires=('host',))\n"
    )
    assert answer_in(ROOT, tmp_path) == "needs the extension host, which is not installed True"


def test_a_broken_extension_of_somebody_else_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    point = EntryPoint("guest", "no_such_module:EXTENSION", GROUP)
    monkeypatch.setattr(extensions, "_entry_points", lambda: iter([("guest", point)]))
    with pytest.warns(UserWarning, match="The rankscope extension guest .guest. is not installed"):
        assert installed.__wrapped__()["guest"].extension is None


def test_what_an_extension_adds_is_in_the_registry_and_its_names_in_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rankscope._registry import Registry

    numbers: Registry[int] = Registry("number")
    guest = Extension(
        name="guest", summary="", adds={"number": lambda: numbers.add("seven", 7)}, names={"seventh": lambda: 7}
    )
    monkeypatch.setattr(extensions, "available", lambda: iter([guest]))
    monkeypatch.setattr(rankscope, "available", lambda: iter([guest]))
    assert dict(numbers) == {"seven": 7}
    assert rankscope.seventh == 7


def site_without(folder: Path, gone: str) -> Path:
    """An installed copy of the package, without one extension; the entry points still name it, as in a wheel."""
    site = folder / f"without_{gone}"
    ignored = str(ROOT / "src/rankscope/ext" / gone)
    shutil.copytree(
        ROOT / "src/rankscope",
        site / "rankscope",
        ignore=lambda place, names: names if place.startswith(ignored) else [],
    )
    shutil.rmtree(site / "rankscope/ext" / gone)
    metadata = site / f"rankscope-{rankscope.__version__}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rankscope\nVersion: {rankscope.__version__}\n")
    lines = [f"{name} = {place}" for name, place in project_table()["entry-points"][GROUP].items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    return site


@pytest.mark.slow
def test_each_extension_can_be_deleted(tmp_path: Path) -> None:
    words = [word for name in FOLDERS for word in (str(site_without(tmp_path, name)), name)]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("without_one.py")), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split("\n")[:-1] == [f"{name} works" for name in FOLDERS], done.stdout + done.stderr


def installed_without(folder: Path, gone: str) -> Path:
    """The distribution without the source of one extension, installed by pip."""
    copy, site = folder / "copy", folder / "site"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = str(ROOT / "src/rankscope/ext" / gone)
    shutil.copytree(ROOT / "src", copy / "src", ignore=lambda place, names: names if place.startswith(ignored) else [])
    shutil.rmtree(copy / "src/rankscope/ext" / gone)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([*pip, str(copy)], check=True, capture_output=True)
    return site


EVERYWHERE = ("tests/runs/test_run.py", "tests/verbs/test_ablating.py", "tests/surgery/test_operating.py")
NEIGHBOURS = {
    "offload": ("tests/execution/test_rendezvous.py", "tests/verbs/test_measuring.py"),
    "paths": ("tests/models/test_heads.py", "tests/linalg/test_blockwise_attention.py"),
    "sweeps": ("tests/runs/test_storage.py", "tests/runs/test_rows.py"),
    "theory": ("tests/masks", "tests/monitor/test_status.py"),
}
"""Core tests of what each extension builds on."""


@pytest.mark.slow
@pytest.mark.parametrize("gone", FOLDERS)
def test_the_core_tests_pass_without_an_extension(gone: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed_without(tmp_path, gone))}
    tests = [name for name in (*EVERYWHERE, *NEIGHBOURS[gone]) if (ROOT / name).exists()]
    assert len(tests) > len(EVERYWHERE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
