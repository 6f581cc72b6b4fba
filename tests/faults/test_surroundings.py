"""A machine that is not as one would wish: no terminal, no home, no memory, no time, no packages."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import rankscope as rs
from tests.faults.conftest import ENVIRONMENT, PATIENCE, ROOT, Warm, cold
from tests.test_extras import BLOCK

SMALL = ["--sequences", "1", "--tokens", "8"]
MEASURE = ["measure", "init:tiny-bert", *SMALL]


@pytest.mark.slow
def test_a_reader_that_went_away(tmp_path: Path) -> None:
    """`rankscope ls presets --json | head -c 1`, the pipe closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    for words in (["ls", "presets", "--json"], ["ls", "metrics"]):
        done = subprocess.run(
            [sys.executable, "-m", "rankscope", *words],
            stdout=writing,
            stderr=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT},
            cwd=tmp_path,
            timeout=PATIENCE,
            check=False,
        )
        assert (done.returncode, done.stderr) == (141, b""), words
    os.close(writing)


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    """`rankscope ls presets --json > /dev/full`."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rankscope", "ls", "presets", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT},
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: The system reported: No space left on device")
    assert done.stderr.count(b"\n") == 1


def test_no_terminal(warm: Warm, tmp_path: Path) -> None:
    """`measure` in a session without a terminal, stdin closed; and with stdout closed before the start."""
    outcome = warm.run(MEASURE, tmp_path, "no_terminal")
    assert outcome.code == 0, outcome.err
    assert "\r" not in outcome.out + outcome.err
    outcome = warm.run([*MEASURE, "--out", "run"], tmp_path, "no_output")
    assert outcome.code == 0, outcome.err
    assert str(rs.load_run(tmp_path / "run"))


@pytest.mark.slow
def test_a_locale_of_few_letters(tmp_path: Path) -> None:
    """LC_ALL=C without Python's own coercion to UTF-8: a table, and JSON."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (tmp_path / "plan.yaml").write_text("models: [init:tiny-bert]\nverbs: [measure]\ninputs: {texts: [déjà vu]}\n")
    words = ["sweep", "plan.yaml", "--dry-run", "--json"]
    few, many = (cold(words, tmp_path, env=env) for env in (plain, {"PYTHONUTF8": "1"}))
    assert few.code == many.code == 0, few.err
    assert json.loads(few.out) == json.loads(many.out)
    assert few.out.isascii()
    assert not many.out.isascii()
    missing = cold(["report", "déjà"], tmp_path, env=plain)
    assert missing.explained, missing
    assert missing.err.isascii()
    assert cold(["ls", "metrics"], tmp_path, env=plain).code == 0


@pytest.mark.slow
def test_names_that_are_no_text(warm: Warm, tmp_path: Path) -> None:
    """A text, a model folder, an output folder and a page whose names hold the byte 0xff."""
    odd = os.fsdecode(b"odd\xff")
    (tmp_path / f"{odd}.txt").write_text("some words to read " * 9)
    words = [*MEASURE, "--text", f"{odd}.txt"]
    outcome = warm.run([*words, "--out", odd], tmp_path)
    assert outcome.code == 0, outcome.err
    assert str(rs.load_run(tmp_path / odd))
    outcome = warm.run([*words, "--json"], tmp_path)
    assert json.loads(outcome.out)["kind"] == "measure"
    outcome = warm.run(["report", odd, "-o", f"{odd}.html"], tmp_path)
    assert outcome.code == 0, outcome.err
    assert (tmp_path / f"{odd}.html").read_text(encoding="utf-8")
    assert warm.run(["measure", f"no-such-{odd}"], tmp_path).explained


@pytest.mark.slow
def test_no_home(warm: Warm, tmp_path: Path) -> None:
    """HOME unset, for a user id that no list of users knows; and a path of the home of nobody."""
    program = (
        "import os, pwd, sys\n"
        "os.environ.pop('HOME', None)\n"
        "def unknown(uid):\n    raise KeyError(f'getpwuid(): uid not found: {uid}')\n"
        "pwd.getpwuid = unknown\n"
        "from rankscope.cli.app import main\nmain(sys.argv[1:])"
    )
    outcome = cold([*MEASURE, "--out", "run"], tmp_path, program=program)
    assert outcome.code == 0, outcome.err
    assert str(rs.load_run(tmp_path / "run"))
    assert warm.run(["predict", "~nobody-of-that-name/config.json"], tmp_path).explained


def test_an_unwritable_cache(warm: Warm, tmp_path: Path) -> None:
    """The caches of the hub, of matplotlib and of the user lie in a folder without the right to write."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o555)
    names = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR", "HOME")
    env = {name: str(cache / "below") for name in names}
    outcome = warm.run([*MEASURE, "--figure", "figure.png"], tmp_path, "bound_by_permissions", env=env)
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_missing_extra(tmp_path: Path) -> None:
    """`sweep` without pyyaml, from the command line."""
    gone = ["jinja2", "yaml", "matplotlib"]
    start = f"GONE = {gone!r}\nROOT = {str(ROOT)!r}\n{BLOCK}\nfrom rankscope.cli.app import main\nmain(sys.argv[1:])"
    (tmp_path / "plan.yaml").write_text("models: [init:tiny-bert]\nverbs: [measure]\n")
    assert cold(["ls", "metrics"], tmp_path, program=start).code == 0
    for words, extra in ((["sweep", "plan.yaml", "--serial"], "sweep"),):
        outcome = cold(words, tmp_path, program=start)
        assert outcome.explained, outcome
        assert f"pip install 'rankscope[{extra}]'" in outcome.err


def test_too_little_memory(warm: Warm, tmp_path: Path) -> None:
    """`measure` of a BERT-base initialisation in an address space that cannot hold it (RLIMIT_AS)."""
    words = ["measure", "init:bert-base", *SMALL]
    outcome = warm.run(words, tmp_path, "little_memory", megabytes=150)
    assert outcome.explained, outcome
    assert "not enough memory" in outcome.err
    assert "--batch" in outcome.err


def test_too_little_memory_to_start(tmp_path: Path) -> None:
    """`measure` in an address space of 500 MB, in which torch cannot be loaded."""

    def narrow() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (5 * 10**8, 5 * 10**8))

    outcome = cold(MEASURE, tmp_path, preexec_fn=narrow)
    assert outcome.explained, outcome
    assert "not enough memory" in outcome.err


def test_a_clock_that_goes_back(warm: Warm, tmp_path: Path) -> None:
    """The wall clock goes back by an hour at every second look, during `measure` and a training run with a gauge."""
    plain = warm.run([*MEASURE, "--json"], tmp_path)
    jumping = warm.run([*MEASURE, "--json", "--out", "run"], tmp_path, "clock_back", hours=1)
    assert jumping.code == 0, jumping.err
    assert json.loads(jumping.out)["rows"] == json.loads(plain.out)["rows"]
    assert (rs.load_run(tmp_path / "run").provenance.wall_seconds or 0) >= 0
    outcome = warm.run([], tmp_path, "train_while_the_clock_jumps", record="record")
    assert outcome.code == 0, outcome.err
    from rankscope.monitor.record import read_record

    assert [reading.step for reading in read_record(tmp_path / "record").readings] == list(range(6))


def test_training_outlives_its_record(warm: Warm, tmp_path: Path) -> None:
    """The record of a training run is a link to /dev/full, from its third step on; and from its start."""
    outcome = warm.run([], tmp_path, "train_on_a_full_disk", record="record")
    assert outcome.code == 0, outcome.err
    assert outcome.out.strip() == "same weights"
    assert outcome.err.count("No space left on device") == 1, outcome.err
    outcome = warm.run([], tmp_path, "begin_on_a_full_disk", record="other")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("record='other' cannot be written to (No space left on device)")


def test_a_fork_behind_a_measurement(warm: Warm, tmp_path: Path) -> None:
    """A process measures, forks, and its child measures again."""
    outcome = warm.run([], tmp_path, "measured_in_a_fork")
    assert (outcome.code, outcome.out.strip()) == (0, "same bits"), outcome.err
