"""A sweep in one process: complete, resumable, idempotent, and honest about what failed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import rankscope as rs
from rankscope.ext.sweeps import running
from rankscope.ext.sweeps.folder import SweepFolder
from rankscope.ext.sweeps.tasks import Task
from rankscope.ext.sweeps.working import Outcome, do

PLAN: dict[str, Any] = {
    "models": ["init:tiny-bert", "init:tiny-gpt2"],
    "verbs": [{"measure": {"metrics": ["relative_residual"]}}, {"ablate": {"variants": ["pure"]}}],
    "seeds": [0, 1],
    "inputs": {"sequences": 1, "tokens": 8},
}
EVERY_FILE = 8


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted((folder / "rows").rglob("*.parquet"))}


def counted(monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> list[str]:
    """Keys of the tasks that really run; the process dies after some of them."""
    ran: list[str] = []

    def counting(task: Task) -> Outcome:
        if stop_after is not None and len(ran) == stop_after:
            raise KeyboardInterrupt
        ran.append(task.key)
        return do(task)

    monkeypatch.setattr(running, "do", counting)
    return ran


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    status = rs.sweep(PLAN, folder, serial=True)
    assert status.counts == {"done": 8, "failed": 0, "missing": 0}
    return folder


def test_one_file_per_task_and_nothing_else(finished: Path) -> None:
    assert len(content(finished)) == EVERY_FILE
    assert len(list((finished / "tasks").iterdir())) == EVERY_FILE
    assert list(finished.rglob(".*")) == []


def test_a_second_start_runs_nothing(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(finished)
    ran = counted(monkeypatch)
    assert rs.sweep(PLAN, finished, serial=True).complete
    assert ran == []
    assert content(finished) == before


@pytest.mark.sampled(3)
@pytest.mark.parametrize("after", [0, 1, 5])
def test_killed_and_started_again_it_ends_as_if_nothing_had_been(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    first = counted(monkeypatch, stop_after=after)
    with pytest.raises(KeyboardInterrupt):
        rs.sweep(PLAN, tmp_path, serial=True)
    second = counted(monkeypatch)
    assert rs.sweep(PLAN, tmp_path, serial=True).complete
    assert len(first) == after
    assert not set(first) & set(second), "a finished task was run again"
    assert content(tmp_path) == content(finished)


@pytest.mark.slow
def test_killed_between_rows_and_record_the_task_counts_as_missing(finished: Path, tmp_path: Path) -> None:
    rs.sweep(PLAN, tmp_path, serial=True)
    lost = sorted((tmp_path / "tasks").iterdir())[0]
    lost.unlink()
    rows = rs.query(tmp_path, "SELECT count(DISTINCT task) AS n FROM rows").to_pylist()[0]["n"]
    assert rows == EVERY_FILE - 1, "rows without a record are no part of the data set"
    assert rs.sweep(PLAN, tmp_path, serial=True).complete
    assert content(tmp_path) == content(finished)


def test_a_plan_that_grew_runs_what_is_new(finished: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rs.sweep({**PLAN, "seeds": [0]}, tmp_path, serial=True)
    ran = counted(monkeypatch)
    assert rs.sweep(PLAN, tmp_path, serial=True).counts["done"] == EVERY_FILE
    assert len(ran) == EVERY_FILE // 2
    smaller = rs.sweep({**PLAN, "models": ["init:tiny-bert"]}, tmp_path, serial=True)
    assert smaller.earlier == EVERY_FILE // 2
    assert rs.query(tmp_path, "SELECT DISTINCT model FROM rows").num_rows == 1


def test_failures_are_kept_with_their_reason_and_healed_ones_forgotten(tmp_path: Path) -> None:
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text('{"model_type": "bert"}')
    plan = {**PLAN, "models": [str(place), "init:tiny-bert"], "verbs": [{"measure": {}}], "seeds": [0]}
    status = rs.sweep(plan, tmp_path / "out", serial=True)
    assert status.counts == {"done": 1, "failed": 1, "missing": 0}
    assert "no weights" in status.failures[0].reason
    assert "no weights" in str(status)
    rs.load("init:tiny-bert").model.save_pretrained(place)
    assert rs.sweep(plan, tmp_path / "out", serial=True).complete
    rs.sweep(plan, tmp_path / "out", serial=True)


def test_what_may_heal_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tries: list[int] = []

    def failing(task: Task) -> Outcome:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("the disk was away")
        return do(task)

    monkeypatch.setattr(running, "do", failing)
    plan = {**PLAN, "models": ["init:tiny-bert"], "verbs": ["measure"], "seeds": [0], "retries": 2}
    assert rs.sweep(plan, tmp_path / "a", serial=True).complete
    tries.clear()
    status = rs.sweep({**plan, "retries": 1}, tmp_path / "b", serial=True)
    assert status.failures[0].reason == "the disk was away"
    assert len(tries) == 2


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(rs.RankscopeError, match="cannot be made a folder"):
        rs.sweep(PLAN, tmp_path / "file", serial=True)
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_said_and_leaves_whole_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[int] = []
    real = SweepFolder.keep_rows

    def full(self: SweepFolder, *given: Any) -> None:
        if len(kept) == 2:
            raise OSError(28, "No space left on device")
        kept.append(1)
        real(self, *given)

    monkeypatch.setattr(SweepFolder, "keep_rows", full)
    with pytest.raises(rs.RankscopeError, match="No space left"):
        rs.sweep(PLAN, tmp_path, serial=True)
    monkeypatch.undo()
    assert rs.sweep(PLAN, tmp_path, serial=True).complete
