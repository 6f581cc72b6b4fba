"""Runs tasks on Ray: as many at a time as cores and memory allow, retried if a worker or a node is lost."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope._version import __version__
from rankscope.errors import InputError, MissingExtraError, RankscopeError
from rankscope.ext.sweeps.sizing import TaskSize, memory_for, size_from_headers, size_on_meta
from rankscope.ext.sweeps.tasks import Task
from rankscope.ext.sweeps.working import TRANSIENT, Outcome, do, failed

OBJECT_STORE = 128 * 2**20
KNOCK_SECONDS = 10.0
AHEAD = 4
"""Tasks handed to Ray per core; more would only wait there."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def ray_module() -> Any:
    """Import Ray; if it is missing, the error says how to install it."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("rankscope sweep (without --serial)", "ray", "sweep") from error
    return ray


@contextmanager
def cluster(address: str | None, workers: int | None) -> Iterator[Any]:
    """Ray, connected to ``address``, to the cluster this process already uses, or to a new local one.

    A cluster started here is also stopped here.

    Raises:
        InputError: nothing answers at ``address``.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    ray = ray_module()
    if ray.is_initialized():
        yield ray
        return
    settings: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        settings |= {"address": "local", "num_cpus": workers, "include_dashboard": False}
        settings["object_store_memory"] = OBJECT_STORE
    else:
        _knock(address)
        settings["address"] = address
    try:
        with _away_from_here():
            ray.init(**settings)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = "here" if address is None else f"at {address}"
        words = " ".join(str(error).split())[:300]
        raise InputError(f"Ray could not be reached {where}: {words} Try --serial, which needs no Ray.") from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _away_from_here() -> Iterator[None]:
    """Keep the current folder off the workers' import path, where Ray would put it first and run any torch.py in it.

    Workers do not need the folder: the paths of a task are absolute.
    """
    # Ray takes the current folder when it starts, so leaving it during the start is enough.
    here = os.getcwd()
    os.chdir(Path(here).anchor)
    try:
        yield
    finally:
        os.chdir(here)


def _knock(address: str) -> None:
    """Fail quickly if nothing listens at the address; Ray itself would wait for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return  # "auto", or another keyword of Ray
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"Ray could not be reached at {address}: {error}. Start it there with `ray start --head`, or try --serial."
        ) from error


def outcomes_on_ray(ray: Any, tasks: Sequence[Task], cpus: float, retries: int) -> Iterator[Outcome]:
    """Yield outcomes as tasks finish; memory and cores are reserved for each task, and lost tasks are retried."""
    work = ray.remote(_work)
    largest = _largest_node(ray, cpus)
    # Submit only a few tasks per core ahead of time: a plan can have many thousands.
    ahead = max(2, int(AHEAD * ray.cluster_resources().get("CPU", 1) / cpus))
    pending: dict[Any, Task] = {}
    sizes, texts = _Sizes(ray), _Texts(ray)
    waiting = iter(tasks)
    while True:
        for task in waiting:
            memory = task.memory or memory_for(sizes.of(task), task.facts)
            if memory > largest:
                yield failed(task, RankscopeError(_too_large(memory, largest)))
                continue
            sized = work.options(num_cpus=cpus, memory=memory, max_retries=retries, retry_exceptions=list(TRANSIENT))
            # The text is passed by reference; inside the task it would be copied for every task.
            pending[sized.remote(replace(task, text=None), texts.of(task), __version__, memory)] = task
            if len(pending) >= ahead:
                break
        if not pending:
            return
        for ready in ray.wait(list(pending), num_returns=1)[0]:
            yield _received(ray, ready, pending.pop(ready))


def _received(ray: Any, ready: Any, task: Task) -> Outcome:
    try:
        return Outcome(task, *ray.get(ready))
    except ray.exceptions.RayTaskError as error:
        return failed(task, error.cause if isinstance(error.cause, Exception) else error)
    except ray.exceptions.RayError as error:
        return failed(task, error)


def _work(task: Task, text: str | None, version: str, memory: int) -> tuple[pa.Table | None, dict[str, Any]]:
    """Runs in a worker, which imports it; both sides must have the same version of rankscope."""
    if version != __version__:
        reason = f"The worker has rankscope {__version__}, the sweep was started with {version}. Install one version."
        return None, failed(task, RankscopeError(reason)).facts
    outcome = do(replace(task, text=text))
    return outcome.table, {**outcome.facts, "asked_bytes": memory}


class _Texts:
    """Puts each text into Ray's object store once, however many tasks read it."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._known: dict[str, Any] = {}

    def of(self, task: Task) -> Any:
        """Reference to the text of a task; None if it has no text."""
        if task.text is None:
            return None
        digest = task.facts["inputs"]["text_sha256"]
        if digest not in self._known:
            self._known[digest] = self._ray.put(task.text)
        return self._known[digest]


class _Sizes:
    """Cached sizes of models: from headers here, or on the meta device in a worker, which imports torch anyway."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._known: dict[tuple[str, str | None], TaskSize | None] = {}

    def of(self, task: Task) -> TaskSize | None:
        """The size of a task's model; None if it is unknown without loading the model."""
        place = (task.spec, task.facts["model_class"])
        if place not in self._known:
            self._known[place] = self._found(*place)
        return self._known[place]

    def _found(self, spec: str, model_class: str | None) -> TaskSize | None:
        if not spec.startswith("init:"):
            path = Path(spec)
            try:
                return size_from_headers(path) if path.is_dir() else None
            except RankscopeError:
                return None  # the task itself will report what is wrong with its files
        try:
            size: TaskSize = self._ray.get(self._ray.remote(size_on_meta).options(num_cpus=1).remote(spec, model_class))
        except self._ray.exceptions.RayError:
            return None
        return size


def _largest_node(ray: Any, cpus: float) -> float:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [node.get("memory", 0.0) for node in nodes if node.get("CPU", 0) >= cpus]
    if not fitting:
        most = max((node.get("CPU", 0) for node in nodes), default=0)
        raise InputError(f"Each task needs {cpus:g} cores (cpus in the plan), and the largest node has {most:g}.")
    return float(max(fitting))


def _too_large(memory: int, largest: float) -> str:
    return (
        f"It needs about {memory / 2**30:.1f} GiB and the largest node has {largest / 2**30:.1f} GiB for tasks. Use a "
        "larger node, a smaller batch or dtype, or set memory in the plan if the estimate is too high."
    )
