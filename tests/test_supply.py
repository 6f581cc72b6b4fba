"""What CI installs: pinned, with hashes, and listed in the bill of materials that is published."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HASHED = (ROOT / "constraints" / "ci-hashed.txt").read_text()
BILL = json.loads((ROOT / "docs" / "data" / "sbom.json").read_text())


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    return {canonical(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.MULTILINE)}


PINNED = pins((ROOT / "constraints" / "ci.txt").read_text())


def named_by_the_project() -> set[str]:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {canonical(re.match(r"[\w.-]+", line)[0]) for line in lines} - {"rankscope"}


def test_every_package_has_hashes_and_the_pinned_version() -> None:
    blocks = re.split(r"\n(?=\w)", HASHED)
    blocks = [block for block in blocks if not block.startswith("#")]
    assert len(blocks) == len(pins(HASHED)) > 200
    for block in blocks:
        first, *hashes = block.strip().split(" \\\n    ")
        name, _, version = first.partition("==")
        assert PINNED[canonical(name)] == version, name
        assert hashes, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), name


def test_what_the_project_names_is_hashed_and_listed() -> None:
    assert named_by_the_project() <= set(pins(HASHED))
    assert named_by_the_project() <= {part["name"] for part in BILL["components"]}


def test_ci_installs_by_hash_where_hashes_are_listed() -> None:
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "pip install" in line]
    by_hash, own, *for_other_pythons = lines
    assert '--require-hashes --no-deps --only-binary :all: -r "$half"' in by_hash
    assert "--no-deps --no-build-isolation -e ." in own
    assert all("-c constraints/ci.txt" in line for line in for_other_pythons)


def test_the_bill_lists_what_is_installed() -> None:
    assert {part["name"]: part["version"] for part in BILL["components"]} == pins(HASHED)
    for part in BILL["components"]:
        assert part["purl"] == part["bom-ref"] == f"pkg:pypi/{part['name']}@{part['version']}"
        assert [one["name"] for one in part["properties"]] == ["rankscope:extras"]


def test_the_bill_says_the_same_every_time_and_nothing_of_a_machine() -> None:
    assert "timestamp" not in BILL["metadata"]
    text = json.dumps({key: value for key, value in BILL.items() if key != "$schema"}) + HASHED
    assert not re.search(r"https?:|file:|/home|/root|/usr|/opt|/tmp", text)


def test_nearly_every_package_has_a_licence() -> None:
    silent = {part["name"] for part in BILL["components"] if not part.get("licenses")}
    assert silent <= {"huey", "skops"}, "a package without a licence: look at it"


def test_dependencies_in_the_bill_are_parts_of_it() -> None:
    known = {part["bom-ref"] for part in BILL["components"]} | {"pkg:pypi/rankscope"}
    assert {one["ref"] for one in BILL["dependencies"]} == known
    assert all(set(one.get("dependsOn", ())) <= known for one in BILL["dependencies"])


def test_a_release_has_one_version_and_one_list_of_dependencies() -> None:
    recipe = (ROOT / "packaging" / "meta.yaml").read_text()
    released = re.sub(r"\.dev\d+$", "", re.search(r'"(.+)"', (ROOT / "src/rankscope/_version.py").read_text())[1])
    assert f'version = "{released}"' in recipe
    assert re.search(rf"^version: {re.escape(released)}(\.dev\d+)?$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert f"\n## {released}" in (ROOT / "CHANGELOG.md").read_text()
    listed = re.findall(r"^    - (\S+) (>=\S+)$", recipe.split("  run:")[1].split("  run_constrained:")[0], re.M)
    named = {name.replace("pytorch", "torch") + bound for name, bound in listed if name != "python"}
    declared = (ROOT / "pyproject.toml").read_text().split("\ndependencies = [")[1].split("]")[0]
    assert named == set(re.findall(r'"(.+?)"', declared))
