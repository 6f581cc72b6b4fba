"""A sweep in one process: complete, resumable, idempotent, and honest about what failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rankscope as rs
from rankscope.errors import InputError
from rankscope.ext.sweeps import running
from rankscope.ext.sweeps.plan import plan_of
from rankscope.ext.sweeps.results import Results
from rankscope.ext.sweeps.running import run_tasks
from rankscope.ext.sweeps.tasks import Task, tasks_of
from rankscope.ext.sweeps.working import Limits, do
from tests.ext.sweeps.folders import rows, task

PLAN: dict[str, Any] = {
    "models": ["init:tiny-bert", "init:tiny-gpt2"],
    "verbs": [{"measure": {"metrics": ["relative_residual"]}}, {"ablate": {"variants": ["pure"]}}],
    "seeds": [0, 1],
    "inputs": {"sequences": 1, "tokens": 8},
}
EVERY_FILE = 8


def rows_in(folder: Path) -> list[tuple[Any, ...]]:
    """Every row of a sweep in one order, as text, so that NaN equals itself."""
    names = "task, verb, model, checkpoint, variant, seed, metric, site, stack, layer, head, sequence, value, status"
    table = rs.query(folder, f"SELECT {names} FROM rows ORDER BY ALL")
    return [tuple(map(repr, row.values())) for row in table.to_pylist()]


def files_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "rows").iterdir()}


def counted(monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> list[str]:
    """Keys of the tasks that really run; the process dies after some of them."""
    ran: list[str] = []

    def counting(task: Task, models: Any) -> Any:
        if stop_after is not None and len(ran) == stop_after:
            raise KeyboardInterrupt
        ran.append(task.key)
        return do(task, models)

    monkeypatch.setitem(run_tasks.__kwdefaults__, "work", counting)
    return ran


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    status = rs.sweep(PLAN, folder, serial=True)
    assert status.counts == {"done": 8, "failed": 0, "missing": 0}
    return folder


def test_one_file_per_chunk_and_nothing_else(finished: Path) -> None:
    assert len(files_in(finished)) == EVERY_FILE
    assert sorted(path.name for path in finished.iterdir()) == ["failures", "rows", "sweep.json", "tasks.parquet"]
    assert list((finished / "failures").iterdir()) == []
    assert list(finished.rglob(".*")) == []


def test_a_second_start_runs_nothing(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_in(finished)
    ran = counted(monkeypatch)
    monkeypatch.setattr(Results, "keys_in", lambda _, names: pytest.fail("a file was opened") if names else {})
    assert rs.sweep(PLAN, finished, serial=True).complete
    assert ran == []
    assert files_in(finished) == before


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("after", [0, 5])
def test_killed_and_started_again_it_ends_as_if_nothing_had_been(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, chunk: int
) -> None:
    first = counted(monkeypatch, stop_after=after)
    with pytest.raises(KeyboardInterrupt):
        rs.sweep(PLAN, tmp_path, serial=True, chunk=chunk)
    second = counted(monkeypatch)
    assert rs.sweep(PLAN, tmp_path, serial=True).complete
    assert len(first) == after
    assert len(set(first) & set(second)) == after % chunk, "what is lost is the chunk at work"
    assert rows_in(tmp_path) == rows_in(finished)


def test_the_chunk_length_is_that_of_the_first_start(tmp_path: Path) -> None:
    plan = {**PLAN, "verbs": PLAN["verbs"][:1]}
    rs.sweep(plan, tmp_path, serial=True, chunk=3)
    assert len(files_in(tmp_path)) == 2
    with pytest.raises(InputError, match="begun with chunks of 3 tasks"):
        rs.sweep(plan, tmp_path, serial=True, chunk=2)
    with pytest.raises(InputError, match="chunk=0"):
        rs.sweep(plan, tmp_path, serial=True, chunk=0)


def test_a_plan_that_grew_in_its_middle_runs_what_is_new(
    finished: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The chunks are others then; finished tasks are found by the keys in the files."""
    rs.sweep({**PLAN, "seeds": [1]}, tmp_path, serial=True, chunk=3)
    ran = counted(monkeypatch)
    assert rs.sweep(PLAN, tmp_path, serial=True).counts["done"] == EVERY_FILE
    assert len(ran) == EVERY_FILE // 2
    assert rows_in(tmp_path) == rows_in(finished)
    ran.clear()
    assert rs.sweep(PLAN, tmp_path, serial=True).complete
    assert ran == []
    smaller = rs.sweep({**PLAN, "models": ["init:tiny-bert"]}, tmp_path, serial=True)
    assert smaller.counts["done"] == smaller.earlier == EVERY_FILE // 2
    assert rs.query(tmp_path, "SELECT DISTINCT model FROM rows").num_rows == 1
    assert len(rs.query(tmp_path, "SELECT * FROM tasks")) == EVERY_FILE // 2


def test_a_task_in_two_files_counts_once(finished: Path, tmp_path: Path) -> None:
    """As where two processes with different plans were at work at once."""
    rs.sweep({**PLAN, "seeds": [1]}, tmp_path, serial=True, chunk=3)
    (tmp_path / "rows").rename(tmp_path / "aside")
    rs.sweep(PLAN, tmp_path, serial=True)
    for path in (tmp_path / "aside").iterdir():
        path.rename(tmp_path / "rows" / path.name)
    assert rows_in(tmp_path) == rows_in(finished)
    rs.sweep({**PLAN, "seeds": [1, 0]}, tmp_path, serial=True)
    assert rows_in(tmp_path) == rows_in(finished)


@pytest.mark.parametrize("chunk", [1, 2])
def test_failures_are_kept_with_their_reason_and_healed_ones_forgotten(tmp_path: Path, chunk: int) -> None:
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text('{"model_type": "bert"}')
    plan = {**PLAN, "models": [str(place), "init:tiny-bert"], "verbs": [{"measure": {}}], "seeds": [0]}
    status = rs.sweep(plan, tmp_path / "out", serial=True, chunk=chunk)
    assert status.counts == {"done": 1, "failed": 1, "missing": 0}
    assert "no weights" in status.failures[0].reason
    assert "no weights" in str(status)
    rs.load("init:tiny-bert").model.save_pretrained(place)
    assert rs.sweep(plan, tmp_path / "out", serial=True).complete
    assert rs.sweep(plan, tmp_path / "out", serial=True).complete


def test_a_chunk_with_a_failure_runs_only_that_task_again(tmp_path: Path) -> None:
    tasks = [task(number) for number in range(7)]
    ran: list[int] = []

    def work(one: Task, models: Any) -> Any:
        ran.append(one.facts["number"])
        if one.facts["number"] == 4 and len(ran) <= 7:
            raise ValueError("no")
        return rows(one, {"mu": [1.0]}), {}

    results = Results.at(tmp_path)
    assert run_tasks(tasks, results, Limits(), chunk=3, serial=True, work=work) == {"done": 6, "failed": 1}
    assert run_tasks(tasks, results, Limits(), serial=True, work=work) == {"done": 1}
    assert ran == [*range(7), 4]
    assert results.contents().failures == {}, "it succeeded since"
    assert run_tasks(tasks, results, Limits(), serial=True, work=work) == {}
    assert len(results.contents().done) == 7


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(rs.RankscopeError, match="cannot be made a folder"):
        rs.sweep(PLAN, tmp_path / "file", serial=True)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small disk, which needs root")
def test_a_full_disk_is_said_and_leaves_whole_files(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "small", disk], check=True)
    try:
        tasks = [task(number) for number in range(20)]
        results = Results.at(disk / "out")

        def work(one: Task, models: Any) -> Any:
            return rows(one, {"mu": [1.0]}), {}

        with pytest.raises(rs.RankscopeError, match=r"Results could not be written to .* \(No space left on device\)"):
            run_tasks(tasks, results, Limits(), chunk=1, serial=True, work=work)
        done = len(results.contents().done)
        assert 0 < done < 20
        assert list(disk.rglob(".*")) == [], "no part of a file is left"
        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        assert run_tasks(tasks, results, Limits(), serial=True, work=work) == {"done": 20 - done}
    finally:
        subprocess.run(["umount", disk], check=True)


def test_shards_do_their_own_share_and_then_what_is_missing(tmp_path: Path) -> None:
    tasks = [task(number) for number in range(12)]
    ran: list[int] = []

    def work(one: Task, models: Any) -> Any:
        ran.append(one.facts["number"])
        return rows(one, {"mu": [1.0]}), {}

    results = Results.at(tmp_path)
    for shard in ((1, 3), (0, 3), (2, 3)):  # one after the other, so the first has to do everything
        run_tasks(tasks, results, Limits(), chunk=2, shard=shard, work=work)
    assert ran[:4] == [2, 3, 8, 9], "chunks 1 and 4 of 0 to 5 are the share of the second of three"
    assert sorted(ran) == list(range(12)), "and nobody runs again what is there"


@pytest.mark.parametrize("word", ["3/3", "a/b", "1", "-1/2", "1/0"])
def test_shards_that_are_none_are_refused(word: str) -> None:
    with pytest.raises(InputError, match="shard"):
        running.shard_of(word)


def test_the_place_in_a_job_array_comes_from_the_environment() -> None:
    slurm = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MAX": "7"}
    assert running.shard_of("auto", slurm) == (5, 8)
    assert running.shard_of("auto", {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "4"}) == (1, 4)
    for wrong in ({}, {"JOB_COMPLETION_INDEX": "1"}, {"SLURM_ARRAY_TASK_ID": "x"}):
        with pytest.raises(InputError, match="shard=auto"):
            running.shard_of("auto", wrong)


def test_ten_thousand_files_at_most_by_default(tmp_path: Path) -> None:
    many = [task(number) for number in range(10_001)]
    assert {len(chunk.tasks) for chunk in Results.at(tmp_path).begin(many, None)} == {2, 1}
    assert len(list(tasks_of(plan_of(PLAN)))) == EVERY_FILE
