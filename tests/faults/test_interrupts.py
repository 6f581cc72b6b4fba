"""A command that is stopped keeps what it had finished, says so, and leaves with the code a shell expects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rankscope as rs
from rankscope.runs.rows import BETWEEN_INPUTS
from tests.faults.conftest import Warm

SMALL = ["--tokens", "8", "--no-progress"]
MEASURE = ["measure", "init:tiny-bert", "--sequences", "4", "--batch", "1", *SMALL]


def values(run: rs.Run) -> dict[tuple[object, ...], float]:
    names = [name for name in run.table.column_names if name not in ("value", "status")]
    keys = zip(*(run.table[name].to_pylist() for name in names), strict=True)
    return dict(zip(keys, run.table["value"].to_pylist(), strict=True))


@pytest.mark.parametrize(("which", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_measure_keeps_whole_sequences(warm: Warm, tmp_path: Path, which: str, code: int) -> None:
    # The first forward pass that is traced is that of the first sequence: discovery runs before the tracer is there.
    """SIGINT in the third of four forward passes of `measure --out`."""
    outcome = warm.run([*MEASURE, "--out", "run"], tmp_path, "signal_in_batch", number=3, which=which)
    assert outcome.code == code, outcome.err
    assert "Interrupted: 2 of 4 sequences were finished" in outcome.err
    assert "saved in run" in outcome.err
    run = rs.load_run(tmp_path / "run")
    assert run.notes[0].startswith("Interrupted: 2 of 4 sequences")
    assert dict(run.extra["interrupted"]) == {"finished": 2, "of": 4, "what": "sequences"}
    assert run.provenance.sequences == len(run.provenance.lengths) == 2
    # The comparison between inputs is over those that were finished.
    site = run.table.column_names.index("site")
    found = {key: value for key, value in values(run).items() if not str(key[site]).startswith(BETWEEN_INPUTS)}
    assert {key[run.table.column_names.index("sequence")] for key in found} == {0, 1}
    assert warm.run([*MEASURE, "--out", "whole", "--quiet"], tmp_path).code == 0
    whole = values(rs.load_run(tmp_path / "whole"))
    assert found == {key: value for key, value in whole.items() if key in found}


def test_an_older_run_outlives_an_early_interrupt(warm: Warm, tmp_path: Path) -> None:
    """SIGINT in the first forward pass, over a run that is already in the folder."""
    assert warm.run([*MEASURE, "--out", "run", "--seed", "7"], tmp_path).code == 0
    before = (tmp_path / "run" / "run.json").read_bytes()
    outcome = warm.run([*MEASURE, "--out", "run"], tmp_path, "signal_in_batch", number=1, which="SIGINT")
    assert (outcome.code, outcome.err) == (130, "Interrupted. Nothing was saved.\n")
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    assert rs.load_run(tmp_path / "run").provenance.seed == 7


def test_ablate_keeps_whole_networks(warm: Warm, tmp_path: Path) -> None:
    """SIGINT in the second of three networks."""
    words = ["ablate", "init:tiny-bert", "--variants", "pure,+skip,full", "--sequences", "2", "--batch", "1", *SMALL]
    outcome = warm.run([*words, "--out", "run"], tmp_path, "signal_in_batch", number=4, which="SIGINT")
    assert outcome.code == 130, outcome.err
    assert "1 of 3 networks were finished" in outcome.err
    run = rs.load_run(tmp_path / "run")
    assert set(run.table["variant"].to_pylist()) == {"pure"}
    assert set(run.table["sequence"].to_pylist()) == {0, 1}
    assert str(run)


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
