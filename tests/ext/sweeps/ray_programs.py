"""Programs that start Ray, each run in a process of its own by the tests; they print one JSON object at the end.

Nodes are separate raylets with their own workers, as on separate machines; they share this machine's cores and disk.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import psutil
import pyarrow as pa
import yaml

import rankscope as rs
from rankscope.ext.sweeps.results import ROWS, Results
from rankscope.ext.sweeps.running import run_tasks
from rankscope.ext.sweeps.tasks import Task
from rankscope.ext.sweeps.working import Limits

SMALL: dict[str, Any] = {
    "models": ["init:tiny-bert", "init:tiny-gpt2"],
    "verbs": [{"measure": {"metrics": ["relative_residual"]}}],
    "inputs": {"sequences": 1, "tokens": 8},
}
SIZE = {"num_cpus": 1, "memory": 2**32, "object_store_memory": 100 * 2**20}


@contextmanager
def small_cluster(nodes: int) -> Iterator[Any]:
    """A cluster of nodes with one core each; what is left of it at the end is ended by its ids."""
    from ray.cluster_utils import Cluster

    before = set(psutil.Process().children(recursive=True))
    cluster = Cluster(initialize_head=True, head_node_args={**SIZE, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**SIZE)
        mine = set(psutil.Process().children(recursive=True)) - before
        yield cluster
    finally:
        cluster.shutdown()
        for left in psutil.wait_procs(mine, timeout=10)[1]:
            left.kill()


def start_sweep(plan: Path, out: str, *options: str) -> subprocess.Popen[bytes]:
    """The command line in a process of its own; what it says goes to a file beside the plan."""
    words = [sys.executable, "-m", "rankscope", "sweep", str(plan), "--out", out, "--no-progress", *options]
    with (plan.parent / "sweep.log").open("ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)


def wait_for(what: Callable[[], bool], driver: subprocess.Popen[bytes], seconds: float = 600) -> None:
    """Until it holds.

    Raises:
        RuntimeError: the driver has ended, or time is up.
    """
    end = time.monotonic() + seconds
    while not what():
        if driver.poll() is not None:
            raise RuntimeError(f"the sweep ended with {driver.returncode} before it could be hurt")
        if time.monotonic() > end:
            raise RuntimeError(f"nothing happened within {seconds:.0f} s")
        time.sleep(0.1)


def files_in(out: str) -> int:
    """How many chunks are stored."""
    return len(Results.at(out).listed(ROWS))


def kill_a_worker(parents: list[int]) -> bool:
    """SIGKILL to a process below one of these that is at work on a chunk."""
    for parent in parents:
        for child in psutil.Process(parent).children(recursive=True):
            try:
                busy = " ".join(child.cmdline()).startswith("ray::_work")
            except psutil.NoSuchProcess:
                continue
            if busy:
                os.kill(child.pid, signal.SIGKILL)
                return True
    return False


def raylet_of(node: Any) -> int:
    return next(info.process.pid for kind, found in node.all_processes.items() if kind == "raylet" for info in found)


def local(folder: Path, out: str) -> dict[str, Any]:
    """Two tasks that run, one that no node can hold, one that fails for a reason of its own."""
    models: list[Any] = [*SMALL["models"], {"model": "init:tiny-bert", "name": "huge", "memory": "900 TB"},
              {"model": "init:tiny-bert", "name": "wrong", "blocks": "nothing.*"}]  # fmt: skip
    (folder / "text.txt").write_text("one two three four five six seven eight nine ten")
    models[1] = {"model": models[1], "inputs": {**SMALL["inputs"], "text": str(folder / "text.txt")}}
    status = rs.sweep({**SMALL, "models": models}, out, workers=1, chunk=2)
    try:
        rs.sweep({**SMALL, "cpus": 500}, folder / "other", workers=1)
        refused = ""
    except rs.RankscopeError as error:
        refused = str(error)
    workers = rs.query(out, "SELECT asked_bytes > peak_bytes AS fits FROM tasks WHERE state = 'done'").to_pylist()
    import ray

    return {**status.to_json(), "refused": refused, "fits": [row["fits"] for row in workers],
            "still up": ray.is_initialized()}  # fmt: skip


def hurt(folder: Path, out: str) -> dict[str, Any]:
    """48 tasks on real models; a worker, a node and the driver are killed; then the sweep is started again."""
    plan = folder / "plan.yaml"
    plan.write_text(yaml.safe_dump({**SMALL, "seeds": list(range(24))}))
    killed: list[str] = []
    with small_cluster(2) as cluster:
        nodes = cluster.list_all_nodes()
        driver = start_sweep(plan, out, "--address", cluster.address, "--chunk", "2")
        wait_for(lambda: files_in(out) >= 1 and kill_a_worker([raylet_of(node) for node in nodes]), driver)
        killed.append(f"worker after {files_in(out)} files")
        cluster.remove_node(nodes[-1], allow_graceful=False)
        killed.append(f"node after {files_in(out)} files")
        before = files_in(out)
        wait_for(lambda: files_in(out) > before, driver)
        driver.kill()
        driver.wait()
        before = files_in(out)
        killed.append(f"driver after {before} files")
        code = start_sweep(plan, out, "--address", cluster.address).wait()
    started = time.perf_counter()
    again = rs.sweep(plan, out, serial=True)
    return {**again.to_json(), "code": code, "killed": killed, "before": before,
            "second run": round(time.perf_counter() - started, 2)}  # fmt: skip


def rows_of(task: Task) -> pa.Table:
    number = task.facts["number"]
    return pa.table({"metric": ["mu"] * 3, "layer": pa.array([0, 1, 2], pa.int32()), "value": [number + 0.5] * 3,
                     "status": ["ok"] * 3, "sequence": [0] * 3})  # fmt: skip


def sick(task: Task, models: Any) -> tuple[pa.Table, dict[str, Any]]:
    """A task that returns a number, or does what its description says."""
    if task.facts["does"] == "exit":
        os._exit(1)
    if task.facts["does"] == "raise":
        raise ZeroDivisionError("a fault of the plan")
    while task.facts["does"] == "never end":
        time.sleep(0.01)
    return rows_of(task), {"seconds": 0.0}


def poison(folder: Path, out: str) -> dict[str, Any]:
    """Three tasks of 32 are bad, in chunks of eight."""
    faults = {5: "raise", 20: "exit", 27: "never end"}
    tasks = [
        Task({"verb": "measure", "model": "m", "variant": None, "seed": number, "number": number,
              "does": faults.get(number, "")}, "nowhere", memory=2**20)
        for number in range(32)
    ]  # fmt: skip
    results = Results.at(out)
    # By value: the workers start in a folder where this module cannot be imported.
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    counts = run_tasks(tasks, results, Limits(retries=1, timeout=3), chunk=8, workers=2, work=sick)
    contents = results.contents()
    reasons = {row["task"]: row["reason"] for row in contents.failures.values()}
    again = run_tasks(tasks, results, Limits(retries=0, timeout=3), workers=2, work=sick)
    return {"counts": counts, "done": len(contents.done), "again": again, "done again": len(results.contents().done),
            "failures": reasons, "bad": [tasks[number].key for number in faults]}  # fmt: skip


if __name__ == "__main__":
    programs = {"local": local, "hurt": hurt, "poison": poison}
    print(json.dumps(programs[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])))
