"""A Ray cluster on one machine that can be hurt.

Nodes are separate raylets with their own workers, as on separate machines; they share this machine's cores and disk.
"""

from __future__ import annotations

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
MEMORY = 2**32
OBJECT_STORE = 100 * 2**20


@contextmanager
def small_cluster(nodes: int) -> Iterator[Any]:
    """A cluster of ``nodes`` nodes with one core each, stopped at the end."""
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 1, "memory": MEMORY, "object_store_memory": OBJECT_STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**size)
        yield cluster
    finally:
        cluster.shutdown()


def start_sweep(plan: Path, out: Path, address: str) -> subprocess.Popen[bytes]:
    """The command line in a process of its own; what it says goes to a file beside ``out``."""
    words = [sys.executable, "-m", "rankscope", "sweep", str(plan), "--out", str(out), "--address", address]
    with (out.parent / f"{out.name}.log").open("ab") as log:
        return subprocess.Popen([*words, "--no-progress"], stdout=log, stderr=log, start_new_session=True)


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
        time.sleep(0.2)


def done_in(out: Path) -> int:
    """How many tasks have their record."""
    folder = out / "tasks"
    return len(list(folder.glob("*.json"))) if folder.is_dir() else 0


def kill_a_worker(node: Any) -> int | None:
    """Kill -9 a process of ``node`` that is at work on a task; its id, or None where none is."""
    import psutil

    raylet = next(one for kind, one in _processes(node) if kind == "raylet")
    for child in psutil.Process(raylet.pid).children(recursive=True):
        try:
            busy = " ".join(child.cmdline()).startswith("ray::_work")
        except psutil.NoSuchProcess:
            continue
        if busy:
            os.kill(child.pid, signal.SIGKILL)
            return child.pid
    return None


def _processes(node: Any) -> list[tuple[str, Any]]:
    return [(kind, info.process) for kind, found in node.all_processes.items() for info in found]


def kill_driver(driver: subprocess.Popen[bytes]) -> None:
    """Kill -9 the process that runs the sweep."""
    driver.kill()
    driver.wait()
