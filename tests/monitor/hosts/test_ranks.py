"""The hosts' own trainers under DDP in two real processes, watched."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rankscope.monitor import read_record
from tests.forked import run_program

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")]
ROOT = Path(__file__).resolve().parents[3]
HOSTS = pytest.mark.parametrize("host", ["trainer", "lightning"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All scenarios, run once."""
    return run_program("tests/monitor/hosts/ranks_program.py", tmp_path_factory.mktemp("hosts"))


def said(runs: Path, name: str) -> list[dict[str, Any]]:
    """What the two ranks said; both ended well."""
    assert json.loads((runs / name / "ended.json").read_text())["codes"] == [0, 0]
    found = [json.loads((runs / name / f"{rank}.json").read_text()) for rank in range(2)]
    assert [rank["world"] for rank in found] == [2, 2]
    assert "DDP" in found[0]["wrapped"] or "DistributedDataParallel" in found[0]["wrapped"]
    return found


@HOSTS
def test_weights_are_bit_equal_to_a_run_that_nobody_watched(runs: Path, host: str) -> None:
    watched, bare = said(runs, host), said(runs, f"{host}-bare")
    assert {rank["weights"] for rank in watched} == {rank["weights"] for rank in bare}
    assert len({rank["weights"] for rank in bare}) == 1


@HOSTS
def test_one_process_records_and_reports_every_step(runs: Path, host: str) -> None:
    said(runs, host)
    record = read_record(runs / host / "record")
    assert [reading.step for reading in record.readings] == [1, 2, 3, 4, 5, 6]
    assert "qk_to_v_gradient" in {row.metric for row in record.readings[0].table}
    assert len(list((runs / host).rglob("*.jsonl"))) == 1
    assert len(list((runs / host).rglob("events.*"))) == 1


def test_host_has_what_was_read_in_every_process(runs: Path) -> None:
    for rank in said(runs, "trainer"):
        assert rank["logged"] == [1, 2, 3, 4, 5, 6]
        assert rank["losses"] == [2, 4, 6]
    assert all(rank["callback_metrics"] for rank in said(runs, "lightning"))


@HOSTS
def test_alarm_stops_all_processes_at_the_same_step(runs: Path, host: str) -> None:
    assert [rank["step"] for rank in said(runs, f"{host}-collapse")] == [5, 5]
    record = read_record(runs / f"{host}-collapse" / "record")
    assert [(alarm.name, alarm.step) for alarm in record.alarms if alarm.name == "token_collapse"] == [
        ("token_collapse", 5)
    ]


@HOSTS
def test_schedule_by_the_clock_hangs_nobody(runs: Path, host: str) -> None:
    assert [rank["step"] for rank in said(runs, f"{host}-clock")] == [12, 12]
    steps = [reading.step for reading in read_record(runs / f"{host}-clock" / "record").readings]
    assert steps
    assert steps[0] == 2, "announced at the first step, read at the next"
