"""A machine that is not as one would wish: no terminal, no home, no memory, no time, no packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import ENVIRONMENT, PATIENCE, ROOT, Warm, cold
from tests.test_extras import BLOCK

SMALL = ["--sequences", "1", "--tokens", "8"]
MEASURE = ["measure", "init:tiny-bert", *SMALL]


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


def test_training_outlives_its_record(warm: Warm, tmp_path: Path) -> None:
    """The record of a training run is a link to /dev/full, from its third step on; and from its start."""
    outcome = warm.run([], tmp_path, "train_on_a_full_disk", record="record")
    assert outcome.code == 0, outcome.err
    assert outcome.out.strip() == "same weights"
    assert outcome.err.count("No space left on device") == 1, outcome.err
    outcome = warm.run([], tmp_path, "begin_on_a_full_disk", record="other")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("record='other' cannot be written to (No space left on device)")
