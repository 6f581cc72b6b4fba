"""The GitHub Action and the pytest fixture, run as a pipeline runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CASES = {"passes": ("relative_residual@block.out < 1e-9", 0), "fails": ("relative_residual@block.out < 2", 1)}


def step_of_the_action(name: str) -> Any:
    steps = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    return next(step for step in steps if step["name"] == name)


def measure_step() -> Any:
    return step_of_the_action("measure")


def test_the_action_imports_nothing_from_the_repository_that_is_checked_out(tmp_path: Path) -> None:
    """A pull request that adds a package called pip."""
    (tmp_path / "pip").mkdir()
    for name in ("__init__.py", "__main__.py"):
        (tmp_path / "pip" / name).write_text(f"open({str(tmp_path / 'pwned')!r}, 'w').close()\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    subprocess.run(
        ["bash", "-c", step_of_the_action("install")["run"]],
        env={"PATH": f"{programs}{os.pathsep}/usr/bin:/bin", "INSTALL": "./no-such-package"},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", []),
        ("--tokens 16", ["--tokens", "16"]),
        ("--tokens 16\n--fail-if 'a < 1'\n", ["--tokens", "16", "--fail-if", "a < 1"]),
        ('--text "two words" --metrics=a,b\n\n  --quiet', ["--text", "two words", "--metrics=a,b", "--quiet"]),
        ("--text a#b --text '#c'", ["--text", "a#b", "--text", "#c"]),
        (
            "$(touch pwned) `touch pwned` ; touch pwned & * ~ $HOME > pwned",
            ["$(touch", "pwned)", "`touch", "pwned`", ";", "touch", "pwned", "&", "*", "~", "$HOME", ">", "pwned"],
        ),
        ("--text it\\'s", ["--text", "it's"]),
        ("--text 'not closed", None),
    ],
)
def test_the_action_passes_every_argument_on_and_runs_none(
    tmp_path: Path, arguments: str, expected: list[str] | None
) -> None:
    """The script of the action in bash, with a rankscope that writes down what it was given."""
    program = tmp_path / "bin" / "rankscope"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open('given.json', 'w'))\nsys.exit(7)\n"
    )
    program.chmod(0o755)
    (program.parent / "python").symlink_to(sys.executable)
    (tmp_path / "work").mkdir()
    given = {"MODEL": "--help", "FAIL_IF": "-x < 1; touch pwned", "OUT": "a b", "ARGUMENTS": arguments}
    step = measure_step()
    assert set(step["env"]) == set(given)
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        env={"PATH": f"{program.parent}{os.pathsep}/usr/bin:/bin", **given},
        cwd=tmp_path / "work",
        capture_output=True,
        text=True,
        check=False,
    )
    written = tmp_path / "work" / "given.json"
    if expected is None:
        assert done.returncode == 1
        assert "Close the quotes" in done.stderr
        assert not written.exists()
        return
    assert done.returncode == 7, done.stderr
    words = json.loads(written.read_text())
    assert words == ["measure", "--out=a b", "--fail-if=-x < 1; touch pwned", *expected, "--", "--help"]
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["given.json"], "something ran"


@pytest.mark.parametrize("file", ["action.yml", "examples/one_file.py", "docs/notebooks/first_look.ipynb"])
def test_what_loads_a_model_by_its_name_installs_what_that_needs(file: str) -> None:
    (extras,) = re.findall(r"rankscope\[([\w,]+)\]", (ROOT / file).read_text(encoding="utf-8"))
    assert "hf" in extras.split(",")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["passes", "fails"])
def test_the_action_fails_if_the_condition_holds(tmp_path: Path, case: str) -> None:
    condition, code = CASES[case]
    step = measure_step()
    given = {
        "MODEL": "init:tiny-bert",
        "FAIL_IF": "relative_residual@block.out < 1e-12",
        # The condition that decides is the second one, on a line of its own, with quotes around its spaces.
        "ARGUMENTS": f"--sequences 2\n--tokens 16\n--fail-if '{condition}'\n",
        "OUT": str(tmp_path / "run"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    assert set(step["env"]) < set(given)
    assert "${{" not in step["run"]  # an input that is part of the script could run as code
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]], env={**os.environ, **given}, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert ("failed: any relative_residual@block.out < 2 holds" in done.stderr) == (case == "fails")
    assert (tmp_path / "summary.md").read_text().startswith("### Rank collapse: init:tiny-bert")


@pytest.mark.slow
def test_the_fixture_fails_a_test_of_a_model_that_collapses(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import rankscope\nHOW = rankscope.Inputs(sequences=2, tokens=16)\n"
        "def test_keeps(assert_keeps_rank):\n    assert assert_keeps_rank('init:tiny-bert', HOW).kind == 'measure'\n"
        "def test_collapses(assert_keeps_rank):\n"
        "    assert_keeps_rank('init:tiny-bert', HOW, fail_if='all relative_residual@block.out < 2')\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "rankscope.pytest_plugin", "."]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "all relative_residual@block.out < 2 holds at block 0" in done.stdout
