"""The GitHub Action and the pytest fixture, run as a pipeline runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CASES = {"passes": ("relative_residual@block.out < 1e-9", 0), "fails": ("relative_residual@block.out < 2", 1)}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["passes", "fails"])
def test_the_action_fails_if_the_condition_holds(tmp_path: Path, case: str) -> None:
    condition, code = CASES[case]
    step = next(
        step for step in yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"] if step["name"] == "measure"
    )
    given = {
        "MODEL": "init:tiny-bert",
        "FAIL_IF": condition,
        "ARGUMENTS": "--sequences 2 --tokens 16",
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


def test_the_fixture_fails_a_test_of_a_model_that_collapses(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "HOW = {'sequences': 2, 'tokens': 16}\n"
        "def test_keeps(assert_keeps_rank):\n    assert assert_keeps_rank('init:tiny-bert', **HOW).kind == 'measure'\n"
        "def test_collapses(assert_keeps_rank):\n"
        "    assert_keeps_rank('init:tiny-bert', fail_if='all relative_residual@block.out < 2', **HOW)\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "rankscope.pytest_plugin", "."]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "all relative_residual@block.out < 2 holds at block 0" in done.stdout
