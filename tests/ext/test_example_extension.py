"""The example extension, in a new environment, is found by the command line, sweeps and the gauge."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "examples/extension"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a new environment that has the example and, by a path file, what this one has."""
    place = tmp_path_factory.mktemp("fresh") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    ours = [
        path for path in sys.path if Path(path).is_dir() and (path.endswith("site-packages") or path.endswith("src"))
    ]
    (packages / "ours.pth").write_text("\n".join(ours))
    interpreter = str(place / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, str(SOURCE)], check=True, capture_output=True)
    return interpreter


def run(python: str, folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, *arguments], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_its_own_contract_tests_pass(python: str, tmp_path: Path) -> None:
    assert "3 passed" in run(python, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(SOURCE / "tests"))


PROGRAM = """
import torch, rankscope as rs
from contextlib import suppress
from rankscope.cli.app import main
for words in ("ls extensions", "loudness init:tiny-bert --sequences 2 --quiet"):
    with suppress(SystemExit):
        main(words.split())
small = {"sequences": 1, "tokens": 8}
plan = {"models": ["init:tiny-bert"], "verbs": [{"verb": "loudness", "louder": 2.0}], "inputs": small}
print(rs.sweep(plan, "swept", serial=True))
assert rs.query("swept", "SELECT count(*) AS n FROM rows WHERE verb = 'loudness'").to_pylist() == [{"n": 3}]
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


def test_the_command_line_sweeps_measure_and_the_gauge_find_it(python: str, tmp_path: Path) -> None:
    said = run(python, tmp_path, "-c", PROGRAM)
    assert "rankscope-loud" in said
    assert "\nLoud: tokens have length" in said
    assert said.endswith("found\n")
