"""Gauges in several real processes: the same numbers as in one, no deadlock, and a record no kill can spoil."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankscope.monitor import Reading, read_record
from tests.forked import run_program
from tests.monitor.ranks_program import SCENARIOS, STEPS

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "tests/monitor/ranks_program.py"
FOUR = ("ddp4", "fsdp4")
ONLY_SLOW = (*FOUR, "alone", "no-batch", "clock-ddp", "clock-fsdp")
MANY = pytest.mark.parametrize(
    "name", ["ddp2", "fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in FOUR)]
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scenarios of the ordinary suite, run once; :func:`codes` adds one of the slow tests when it is needed."""
    ordinary = [name for name in SCENARIOS if name not in ONLY_SLOW]
    return run_program(PROGRAM, tmp_path_factory.mktemp("ranks"), patience=300, scenarios=ordinary)


def codes(runs: Path, name: str) -> list[Any]:
    if not (runs / name).exists():
        run_program(PROGRAM, runs, scenarios=[name])
    found: list[Any] = json.loads((runs / name / "ended.json").read_text())["codes"]
    return found


def seen(runs: Path, name: str) -> list[dict[str, Any]]:
    """What each rank that lived to the end saw."""
    codes(runs, name)
    return [json.loads(path.read_text()) for path in sorted((runs / name).glob("[0-9].json"))]


def numbers(reading: dict[str, Any]) -> dict[tuple[str, int], float]:
    rows = [dict(zip(reading["columns"], row, strict=True)) for row in reading["rows"]]
    return {(row["metric"], row["layer"]): row["mean"] for row in rows}


WHOLE = ("weight_motion", "still_steps", "weights_moved", "embedding_spread")
"""Not read of a model whose weights are sharded."""


@pytest.mark.slow
@MANY
def test_numbers_are_those_of_one_process(runs: Path, name: str) -> None:
    one = seen(runs, "alone")[0]["readings"]
    ranks = seen(runs, name)
    assert codes(runs, name) == [0] * len(ranks)
    for rank in ranks:
        assert [reading["step"] for reading in rank["readings"]] == list(range(STEPS))
        for got, want in zip(rank["readings"], one, strict=True):
            expected = {key: value for key, value in numbers(want).items() if "fsdp" not in name or key[0] not in WHOLE}
            assert numbers(got).keys() == expected.keys(), numbers(got).keys() ^ expected.keys()
            assert numbers(got) == pytest.approx(expected, rel=1e-9)
            assert ("qk_to_v_gradient", 1) in numbers(got)


@MANY
def test_every_rank_has_the_same_numbers_and_the_first_records_them(runs: Path, name: str) -> None:
    ranks = seen(runs, name)
    first = [numbers(reading) for reading in ranks[0]["readings"]]
    for rank in ranks[1:]:
        assert [numbers(reading) for reading in rank["readings"]] == first
    record = read_record(runs / name / "record")
    assert [numbers(reading.to_json()) for reading in record.readings] == first
    assert record.torn == 0
    assert len(list((runs / name / "record").glob("*.jsonl"))) == 1


@pytest.mark.parametrize("name", ["ddp2", "fsdp2"])
def test_weights_are_bit_equal_to_a_run_without_a_gauge(runs: Path, name: str) -> None:
    bare, watched = seen(runs, f"{name}-bare"), seen(runs, name)
    assert [rank["weights"] for rank in bare] == [rank["weights"] for rank in watched]
    assert [rank["parameters"] for rank in bare] == [rank["parameters"] for rank in watched]


@pytest.mark.slow
def test_rank_without_a_batch_holds_up_nobody(runs: Path) -> None:
    assert codes(runs, "no-batch") == [0, 0]
    assert [rank["steps"] for rank in seen(runs, "no-batch")] == [[0, 1, 2, 3], [0, 1]]


def test_sharded_model_is_not_read_when_a_rank_does_not_call_and_the_run_goes_on(runs: Path) -> None:
    assert codes(runs, "fsdp-absent") == [0, 0]
    present, absent = seen(runs, "fsdp-absent")
    assert [reading["step"] for reading in present["readings"]] == [0, 1]
    assert "not all 2 ranks" in present["disabled"]
    assert absent["disabled"] is None
    assert present["weights"] == seen(runs, "fsdp2-bare")[0]["weights"]


def test_gauge_that_fails_on_one_rank_lets_the_others_go_at_once(runs: Path) -> None:
    assert codes(runs, "fsdp-failing") == [0, 0]
    ended = json.loads((runs / "fsdp-failing" / "ended.json").read_text())
    assert ended["seconds"] < 40.0  # patience was 60
    assert [rank["last"] for rank in seen(runs, "fsdp-failing")] == [0, 0]
    assert all(rank["disabled"] for rank in seen(runs, "fsdp-failing"))


def test_every_rank_is_in_the_record_at_the_end(runs: Path) -> None:
    for name in ("ddp2", "fsdp2"):
        ranks = read_record(runs / name / "record").facts["status"]["ranks"]
        assert list(ranks) == ["0", "1"]
        assert {(rank["read"], rank["layers"]) for rank in ranks.values()} == {(2, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clock-ddp", "clock-fsdp"])
def test_first_rank_decides_where_the_clock_does(runs: Path, name: str) -> None:
    assert codes(runs, name) == [0, 0]
    for rank in seen(runs, name):
        assert [reading["step"] for reading in rank["readings"]] == [1, 6, 10]  # announced one step ahead


@pytest.mark.parametrize(("name", "victim"), [("kill-first", 0), ("kill-second", 1)])
def test_killed_rank_leaves_a_whole_record(runs: Path, name: str, victim: int) -> None:
    assert codes(runs, name)[victim] == -9
    record = read_record(runs / name / "record")
    assert [reading.step for reading in record.readings][:3] == [0, 1, 2]
    assert all(isinstance(reading, Reading) and len(reading.table) > 10 for reading in record.readings)
