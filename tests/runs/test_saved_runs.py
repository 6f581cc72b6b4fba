"""Runs saved by version 0.1.0.dev0, one per verb: they load with the same bits, print, are reported and compared."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rankscope.cli.app import app
from rankscope.reporting.pages import report
from rankscope.runs.comparison import compare
from rankscope.runs.run import load_run

HOME = Path(__file__).parents[1] / "golden" / "saved"
NAMES = sorted(path.name for path in HOME.iterdir() if path.is_dir())
HASHES = json.loads((HOME / "hashes.json").read_text())


def digest(folder: Path) -> str:
    """Of every value, bit by bit, in the order of the rows."""
    return hashlib.sha256(load_run(folder).table["value"].to_numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_values_are_read_bit_by_bit(name: str) -> None:
    assert digest(HOME / name) == HASHES[name]


@pytest.mark.parametrize("name", NAMES)
def test_it_prints_with_the_sentence_it_was_saved_with(name: str) -> None:
    run = load_run(HOME / name)
    saved = json.loads((HOME / name / "run.json").read_text())["verdict"]
    assert run.verdict == saved
    assert "".join(saved.split()) in "".join(str(run).split())


@pytest.mark.parametrize("name", NAMES)
def test_it_is_reported_and_names_its_command(name: str, tmp_path: Path) -> None:
    run = load_run(HOME / name)
    page = report(run, tmp_path / "page.html").read_text()
    assert run.provenance.model in page
    shown = CliRunner().invoke(app, ["rerun", str(HOME / name), "--show"])
    assert shown.output.split()[:2] == ["rankscope", name.split("-")[0]]


@pytest.mark.parametrize("name", ["measure", "measure-two-stacks"])
def test_it_is_compared_with_itself(name: str) -> None:
    run = load_run(HOME / name)
    assert {row["difference"] for row in compare(run, run).to_json()["rows"]} == {0.0}
