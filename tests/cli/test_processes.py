"""``torchrun -m rankscope``: several processes, one answer, one voice."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rankscope
from rankscope.errors import InputError
from rankscope.execution.launching import launched
from rankscope.verbs._spec import VERBS, Verb

ROOT = Path(__file__).parents[2]


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=240)


@pytest.mark.slow
def test_two_processes_say_once_what_one_says(tmp_path: Path) -> None:
    words = shlex.split(VERBS["measure"].under_torchrun)
    place = tmp_path / "run"
    done = torchrun(*words[1:], "--json", "--out", str(place))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = rankscope.measure("init:tiny-llama", rankscope.Inputs(sequences=8, tokens=16, batch=2))
    finally:
        torch.set_num_threads(threads)
    assert found["processes"] == {"count": 2, "parallel": "data"}
    assert found["rows"] == one.to_json()["rows"]
    assert found["verdict"] == one.verdict
    assert rankscope.load_run(place).table.equals(one.table)
    assert done.stderr.count("saved in") == 1


BROKEN = """
import os, sys
from rankscope.errors import LoadError
from rankscope.cli.app import main
from rankscope.models import loading

def fail(*_, **__):
    raise LoadError("a test broke this")

if os.environ["RANK"] == sys.argv[1]:
    loading.load = fail
main(["measure", "init:tiny-lama", "--quiet"] if sys.argv[1] == "2" else ["measure", "init:tiny-bert", "--quiet"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("broken", [1, 2])
def test_an_error_is_told_once(tmp_path: Path, broken: int) -> None:
    """In one process alone, or (there is no third one) in both alike."""
    program = tmp_path / "program.py"
    program.write_text(BROKEN)
    done = torchrun("--nproc-per-node", "2", str(program), str(broken))
    assert done.returncode != 0
    assert done.stdout == ""
    told = "a test broke this" if broken == 1 else "There is no preset named 'tiny-lama'. Did you mean 'tiny-llama'"
    assert done.stderr.count(told) == 1
    if broken == 1:
        assert "process 1 of 2" in done.stderr.casefold()


def test_verbs_that_would_only_repeat_are_refused(monkeypatch: pytest.MonkeyPatch, cli) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    outcome = cli("predict", "depth=4")
    assert outcome.code == 2
    assert "2 processes were started, and rankscope predict does not share its work" in outcome.err
    monkeypatch.setenv("RANK", "1")
    outcome = cli("predict", "depth=4")
    assert (outcome.code, outcome.err) == (2, "")


def test_help_needs_no_other_process(monkeypatch: pytest.MonkeyPatch, cli) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    outcome = cli("measure", "--help-all")
    assert outcome.code == 0
    assert VERBS["measure"].under_torchrun in outcome.out


@pytest.mark.parametrize("verb", [verb for verb in VERBS.values() if verb.execution is not None])
def test_help_says_why_not(cli, verb: Verb) -> None:
    said = " ".join(cli(verb.name, "--help-all").out.split())
    for reason in (verb.execution.no_offload, verb.execution.no_spread):
        assert reason is None or reason in said


def test_spreading_a_model_needs_several_processes(cli) -> None:
    outcome = cli("measure", "init:tiny-llama", "--parallel", "tensor")
    assert outcome.code == 2
    assert "there is one. Start several, e.g. torchrun --nproc-per-node 2" in " ".join(outcome.err.split())


@pytest.mark.parametrize(("rank", "world"), [("x", "2"), ("2", "2"), ("-1", "2")])
def test_odd_surroundings_are_named(rank: str, world: str) -> None:
    around = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(InputError, match=rf"RANK={rank!r}|RANK={rank} "):
        launched(around)


def test_one_process_of_one_is_alone() -> None:
    assert launched({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}) is None
