"""Processes that share a folder: each task is done once, whoever is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

import rankscope as rs
from rankscope.errors import InputError, ResultError
from rankscope.ext.sweeps import running
from rankscope.ext.sweeps.claims import Claims, Shard, shard_of
from rankscope.ext.sweeps.folder import SweepFolder
from rankscope.ext.sweeps.plan import plan_of
from rankscope.ext.sweeps.tasks import Task, tasks_of
from rankscope.ext.sweeps.working import Outcome
from tests.ext.sweeps import shard_program

MEASURE = {"measure": {"metrics": ["relative_residual"], "sites": ["block.out"]}}
INPUTS = {"sequences": 1, "tokens": 4, "random_tokens": True}


def plan(seeds: int) -> dict[str, Any]:
    return {"models": ["init:tiny-bert"], "verbs": [MEASURE], "seeds": list(range(seeds)), "inputs": INPUTS}


def begun(folder: Path, seeds: int) -> tuple[SweepFolder, list[Task]]:
    tasks = list(tasks_of(plan_of(plan(seeds))))
    home = SweepFolder(folder)
    home.begin(task.expected for task in tasks)
    return home, tasks


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_every_shard_tries_every_task_once_and_its_own_first(count: int) -> None:
    tasks: Any = list(range(20))
    shares = []
    for index in range(count):
        order = Shard(index, count).order(tasks)
        assert sorted(order) == tasks
        shares += order[: len(tasks[index::count])]
    assert sorted(shares) == tasks


@pytest.mark.parametrize("word", ["8/8", "1", "-1/4", "0/0", "1/2/3", "a/b", "", "1/2 "])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(InputError, match="shard"):
        shard_of(word)


def test_job_arrays_and_indexed_jobs_tell_their_place() -> None:
    slurm = {"SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_MAX": "11"}
    assert shard_of("auto", slurm) == Shard(0, 8)
    listed = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "7"}
    assert shard_of("auto", listed | {"SLURM_ARRAY_TASK_COUNT": "3"}) == Shard(7, 8)
    assert shard_of("auto", {"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "5"}) == Shard(2, 5)
    with pytest.raises(InputError, match="JOB_COMPLETIONS"):
        shard_of("auto", {"JOB_COMPLETION_INDEX": "2"})
    with pytest.raises(InputError, match="--shard INDEX/COUNT"):
        shard_of("auto", {})


@pytest.mark.parametrize("other", [{"serial": True}, {"address": "auto"}, {"workers": 2}])
def test_a_shard_is_one_process(tmp_path: Path, other: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="leave out"):
        rs.sweep(plan(1), tmp_path, shard="0/2", **other)


def test_a_claim_keeps_others_out_and_ends_with_its_process(tmp_path: Path) -> None:
    home, tasks = begun(tmp_path / "sweep", 3)
    pid = os.fork()
    if pid == 0:
        claimed = Claims(home).waiting(tasks)
        next(claimed)
        (tmp_path / "ready").touch()
        signal.pause()
        os._exit(0)
    try:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        assert [task.key for task in Claims(home).waiting(tasks)] == [task.key for task in tasks[1:]]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert list(Claims(home).waiting(tasks)) == tasks


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with pytest.raises(ResultError, match="without locks"):
        rs.sweep(plan(1), tmp_path, shard="0/1")


def test_a_failure_is_tried_by_one_process_and_again_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, tasks = begun(tmp_path, 2)
    others = Claims(home)
    failing = [Outcome(task, None, {"state": "failed", "reason": "no", "type": "LoadError"}) for task in tasks]
    monkeypatch.setattr(running, "do", lambda task: failing[tasks.index(task)])
    assert rs.sweep(plan(2), tmp_path, shard="0/2").counts["failed"] == 2
    assert list(others.waiting(tasks)) == []
    assert list(Claims(home).waiting(tasks)) == tasks


def test_a_task_that_was_compacted_meanwhile_is_not_run_again(tmp_path: Path) -> None:
    home, tasks = begun(tmp_path, 2)
    waiting = Claims(home).waiting(tasks)
    first = next(waiting)
    rs.sweep(plan(2), tmp_path, serial=True)
    rs.compact(tmp_path)
    assert first is tasks[0]
    assert list(waiting) == []


SCHEDULERS = Path(__file__).parents[3] / "examples" / "schedulers"


def run_words(words: list[str], variables: dict[str, str]) -> None:
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(words, check=True, timeout=300, env={**os.environ, "PATH": tools, **variables})


@pytest.mark.slow
def test_the_examples_for_schedulers_run(tmp_path: Path) -> None:
    """The shell part of both, as the first and the second of two processes of each scheduler would run it."""
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan(2)))
    place = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "1"}
    script = ["bash", str(SCHEDULERS / "sweep.sbatch"), str(tmp_path / "plan.yaml"), str(tmp_path / "slurm")]
    run_words(script, {**place, "SLURM_CPUS_PER_TASK": "1"})
    job = yaml.safe_load((SCHEDULERS / "sweep-job.yaml").read_text())["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert variables == {"JOB_COMPLETIONS": str(job["completions"])}
    words = [word.replace("/results", str(tmp_path)) for word in (*container["command"], *container["args"])]
    run_words(words, {**variables, "JOB_COMPLETION_INDEX": "0"})
    for folder in ("slurm", "sweep"):
        assert len(SweepFolder(tmp_path / folder).contents().done) == 2


def forking() -> Any:
    """Processes forked from one that has imported everything: the time goes to the tasks, at which they meet."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.ext.sweeps.shard_program"])
    return server


def shared_sweep(
    folder: Path, *, processes: int, seeds: int, kills: int, pause: float, is_tiny: bool
) -> tuple[Counter[str], Counter[str]]:
    """Run a plan in several processes, kill and restart some: how often each task was started, and kept."""
    folder.mkdir()
    file, log = folder / "plan.yaml", folder / "log"
    file.write_text(yaml.safe_dump(plan(seeds)))
    server = forking()

    def start(number: int) -> BaseProcess:
        words = (str(file), str(folder / "sweep"), f"{number}/{processes}", str(log))
        started = server.Process(target=shard_program.main, args=words, kwargs={"is_tiny": is_tiny})
        started.start()
        return started

    running_now = [start(number) for number in range(processes)]
    for number in range(kills):
        wanted = (number + 1) * seeds // (kills + 2)
        while not log.exists() or log.read_text().count("kept") < wanted:
            time.sleep(0.005)
        time.sleep(pause * number)
        running_now[number].kill()
        running_now[number].join()
        running_now[number] = start(number)
    for one in running_now:
        one.join(600)
    assert [one.exitcode for one in running_now] == [0] * processes
    lines = [line.split() for line in log.read_text().splitlines()]
    return tuple(Counter(key for word, key, _ in lines if word == wanted) for wanted in ("start", "kept"))  # type: ignore[return-value]


def check_shared(
    folder: Path, serial: Path, *, processes: int, seeds: int, kills: int, pause: float = 0.0, is_tiny: bool = False
) -> int:
    """Each row exactly once, equal to those of a serial run; how many tasks were started twice: only killed ones."""
    started, kept = shared_sweep(folder, processes=processes, seeds=seeds, kills=kills, pause=pause, is_tiny=is_tiny)
    keys = SweepFolder(serial).contents().done
    assert len(keys) == seeds
    # A process can be killed after it has kept a result and before it has noted so; it cannot keep one twice.
    assert set(kept) <= keys
    assert len(keys - set(kept)) <= kills
    assert max(kept.values()) == 1
    assert sum(started.values()) - seeds <= kills
    files = sorted(path.relative_to(serial) for path in (serial / "rows").rglob("*.parquet"))
    assert files == sorted(path.relative_to(folder / "sweep") for path in (folder / "sweep/rows").rglob("*.parquet"))
    for path in files:
        assert pq.read_table(serial / path, partitioning=None).equals(
            pq.read_table(folder / "sweep" / path, partitioning=None)
        )
    return sum(started.values()) - seeds


@pytest.mark.slow
def test_three_processes_one_of_them_killed(tmp_path: Path) -> None:
    rs.sweep(plan(10), tmp_path / "serial", serial=True)
    check_shared(tmp_path / "shared", tmp_path / "serial", processes=3, seeds=10, kills=1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_eight_processes_three_of_them_killed_ten_rounds(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan(400)))
    words = (str(tmp_path / "plan.yaml"), str(tmp_path / "serial"), None, str(tmp_path / "log"))
    alone = forking().Process(target=shard_program.main, args=words, kwargs={"is_tiny": True})
    alone.start()
    alone.join(600)
    again = [
        check_shared(
            tmp_path / f"shared-{turn}", tmp_path / "serial",
            processes=8, seeds=400, kills=3, pause=0.013 * turn, is_tiny=True,
        )
        for turn in range(10)
    ]  # fmt: skip
    print(f"started again after a kill, of 400 tasks in each round: {again}")
