"""A command that is stopped says so, and leaves with the code a shell expects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rankscope as rs
from tests.faults.conftest import Warm

SMALL = ["--tokens", "8", "--no-progress"]
MEASURE = ["measure", "init:tiny-bert", "--sequences", "4", "--batch", "1", *SMALL]


@pytest.mark.parametrize(("which", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_older_run_outlives_an_interrupt(warm: Warm, tmp_path: Path, which: str, code: int) -> None:
    """A signal in the third of four forward passes, over a run that is already in the folder."""
    assert warm.run([*MEASURE, "--out", "run", "--seed", "7"], tmp_path).code == 0
    before = (tmp_path / "run" / "run.json").read_bytes()
    outcome = warm.run([*MEASURE, "--out", "run"], tmp_path, "signal_in_batch", number=3, which=which)
    assert (outcome.code, outcome.err) == (code, "Interrupted. Nothing was saved.\n")
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    assert rs.load_run(tmp_path / "run").provenance.seed == 7


def test_a_sweep_goes_on_where_it_was_stopped(warm: Warm, tmp_path: Path) -> None:
    """SIGINT in the second of two tasks of `sweep --serial`."""
    plan = {
        "models": ["init:tiny-bert", "init:tiny-gpt2"],
        "verbs": ["measure"],
        "inputs": {"sequences": 1, "tokens": 8},
    }
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    words = ["sweep", "plan.yaml", "--serial", "--out", "data", "--no-progress"]
    outcome = warm.run(words, tmp_path, "signal_in_task", number=2, which="SIGINT")
    assert outcome.code == 130, outcome.err
    assert "1 of 2 tasks are complete in data" in outcome.err
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "data" / "rows").iterdir()}
    assert len(kept) == 1
    assert warm.run(words, tmp_path).code == 0
    assert warm.run(["sweep", "status", "data"], tmp_path).out.count("2 of 2 tasks done") == 1
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
