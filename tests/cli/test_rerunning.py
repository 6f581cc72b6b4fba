"""``rankscope rerun`` with real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.cli.rerunning import command_again, refuse_reaching
from rankscope.errors import InputError
from tests.runs.builders import write_sealed


def rankscope(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rankscope", *words], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_saved_run_comes_out_again_to_the_bit(tmp_path: Path) -> None:
    run = tmp_path / "run"
    few = ("--sequences", "2", "--tokens", "8", "--seed", "3")
    made = rankscope("measure", "init:tiny-bert", *few, "-q", "--out", str(run))
    assert made.returncode == 0, made.stderr
    again = rankscope("rerun", str(run), "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["same"] is True
    shown = rankscope("rerun", str(run), "--show")
    assert shown.stdout.strip() == "rankscope measure init:tiny-bert --sequences 2 --tokens 8 --seed 3"


@pytest.mark.slow
def test_a_changed_number_is_found(cli, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    few = ("--sequences", "1", "--tokens", "8", "-q", "--metrics", "relative_residual")
    cli("measure", "init:tiny-bert", *few, "--seed", "3", "--out", str(run))
    cli("measure", "init:tiny-bert", *few, "--seed", "4", "--out", str(other))
    facts, rows = json.loads((other / "run.json").read_text()), json.loads((run / "run.json").read_text())
    facts["provenance"]["command"] = rows["provenance"]["command"]
    write_sealed(other / "run.json", facts)
    again = rankscope("rerun", str(other))
    assert again.returncode == 1
    assert "Not the same" in again.stdout


@pytest.mark.parametrize(
    "words",
    [["http://127.0.0.1:1/x"], ["init:tiny-bert", "--text", "/etc/passwd"], ["init:tiny-bert", "--text=/etc/passwd"],
     ["init:tiny-bert", "--tokenizer", "/etc"]],
)  # fmt: skip
def test_files_and_servers_of_a_stranger_need_trust(words: list[str]) -> None:
    with pytest.raises(InputError, match="--trust"):
        refuse_reaching(command_again(["rankscope", "measure", *words]))


def test_the_checkpoints_of_a_stranger_go_nowhere() -> None:
    command = ["rankscope", "measure", "init:tiny-bert", "--work", "elsewhere", "--work=there", "--seed", "1"]
    assert command_again(command) == ["measure", "init:tiny-bert", "--seed", "1"]
    refuse_reaching(command_again(command))


@pytest.mark.parametrize(
    "command", [["rm", "-rf", "x"], ["rankscope"], ["rankscope", "play"], ["python", "measure", "x"], []]
)
def test_nothing_but_a_verb_of_rankscope_is_started(command: list[str]) -> None:
    with pytest.raises(InputError, match="not a single rankscope command"):
        command_again(command)
