"""The example extension, installed into a folder of its own, is found by the command line, sweeps and the gauge."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "examples/extension"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables under which it is installed."""
    place = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(place)]
    subprocess.run([*pip, str(SOURCE)], check=True, capture_output=True)
    return {**os.environ, "PYTHONPATH": str(place), "RANKSCOPE_PLACE": str(place)}


def run(installed: dict[str, str], folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=installed, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_line_finds_it(installed: dict[str, str], tmp_path: Path) -> None:
    listed = run(installed, tmp_path, "-m", "rankscope", "ls", "extensions")
    assert "rankscope-loud" in listed
    said = run(installed, tmp_path, "-m", "rankscope", "loudness", "init:tiny-bert", "--sequences", "2", "--quiet")
    assert said.startswith("Loud: tokens have length")


def test_its_own_contract_tests_pass(installed: dict[str, str], tmp_path: Path) -> None:
    assert "3 passed" in run(installed, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(SOURCE / "tests"))


PROGRAM = """
import torch, rankscope as rs
from rankscope.ext.sweeps.plan import plan_of
plan_of({"models": ["init:tiny-bert"], "verbs": [{"verb": "loudness", "louder": 2.0}]})
run = rs.measure("init:tiny-bert", rs.Inputs(sequences=2, tokens=8), metrics=["nuclear_rank"])
assert set(run.table["metric"].to_pylist()) == {"nuclear_rank"}
model = rs.load("init:tiny-bert").model
ids = {"input_ids": torch.randint(5, 90, (8, 8))}
with rs.Gauge(model, ids, schedule=1, metrics=["nuclear_rank"], strict=True) as gauge:
    reading = gauge.step(0)
assert any("nuclear_rank" in name for name in reading.scalars), sorted(reading.scalars)
with rs.remedies.applied(model, "small_branches", inputs=ids):
    model(**ids)
print("found")
"""


def test_sweeps_measure_and_the_gauge_find_it(installed: dict[str, str], tmp_path: Path) -> None:
    assert run(installed, tmp_path, "-c", PROGRAM).endswith("found\n")
