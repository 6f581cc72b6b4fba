"""Files of every schema that was ever released are still read, or refused in words.

When a schema changes, its version goes up, a folder written by the last release joins ``tests/golden/schemas``, and the
reader learns to bring it up to date. Nothing here is ever deleted.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rankscope.errors import ResultError
from rankscope.monitor import record as gauge_record
from rankscope.monitor.record import read_record
from rankscope.runs.provenance import SCHEMA
from rankscope.runs.run import load_run
from tests.runs.builders import write_sealed

HOME = Path(__file__).parents[1] / "golden" / "schemas"


@pytest.mark.parametrize("version", range(1, SCHEMA + 1))
def test_runs_of_every_schema_are_read(version: int) -> None:
    run = load_run(HOME / f"run-{version}")
    assert run.kind == "measure"
    assert run.curve("relative_residual", "block.out").mean.tolist()[-2:] == [0.875, 0.5]
    assert run.provenance.command == ("rankscope", "measure", "init:tiny-bert")


@pytest.mark.parametrize("version", range(1, gauge_record.SCHEMA + 1))
def test_records_of_every_schema_are_read(version: int) -> None:
    record = read_record(HOME / f"gauge-{version}")
    rows = [row for row in record.table().to_pylist() if (row["metric"], row["layer"]) == ("relative_residual", 1)]
    assert [(row["step"], row["mean"]) for row in rows] == [(0, 0.5), (10, 0.001)]
    assert record.alarms[0].name == "token_collapse"


def test_a_schema_of_the_future_is_refused_with_what_to_do(tmp_path: Path) -> None:
    home = tmp_path / "run"
    shutil.copytree(HOME / f"run-{SCHEMA}", home)
    facts = json.loads((home / "run.json").read_text())
    write_sealed(home / "run.json", {**facts, "schema": SCHEMA + 1})
    with pytest.raises(ResultError, match="Read it with the version that wrote it"):
        load_run(home)
    write_sealed(tmp_path / "readings-00000.jsonl", {"rankscope_gauge": gauge_record.SCHEMA + 1})
    with pytest.raises(ResultError, match="Read it with the version that wrote it"):
        read_record(tmp_path)
