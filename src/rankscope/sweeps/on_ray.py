"""Tasks on Ray: as many at a time as cores and memory allow, tried again when a worker or a node is lost."""

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
from rankscope.sweeps.sizing import TaskSize, memory_for, size_from_headers, size_on_meta
from rankscope.sweeps.tasks import Task
from rankscope.sweeps.working import TRANSIENT, Outcome, do, failed

OBJECT_STORE = 128 * 2**20
KNOCK_SECONDS = 10.0
AHEAD = 4
"""Tasks handed to Ray per core; more would only wait there."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def ray_module() -> Any:
    """Ray, or the line that installs it."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("rankscope sweep (without --serial)", "ray", "sweep") from error
    return ray


@contextmanager
def cluster(address: str | None, workers: int | None) -> Iterator[Any]:
    """Ray, connected to ``address``, to what this process is connected to already, or to a node of its own.

    What is started here is stopped here.

    Raises:
        InputError: when nothing answers at ``address``.
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
    """Ray puts the folder it is started in before all libraries of its workers, where a file torch.py would run.

    Workers do not need that folder: the paths of a task are absolute.
    """
    here = os.getcwd()
    os.chdir(Path(here).anchor)
    try:
        yield
    finally:
        os.chdir(here)


def _knock(address: str) -> None:
    """Ray itself waits for minutes where nobody listens."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return  # "auto", or another word that Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"Ray could not be reached at {address}: {error}. Start it there with `ray start --head`, or try --serial."
        ) from error


def outcomes_on_ray(ray: Any, tasks: Sequence[Task], cpus: float, retries: int) -> Iterator[Outcome]:
    """Outcomes as they come; memory and cores are reserved for each task, and lost ones are run again."""
    work = ray.remote(_work)
    largest = _largest_node(ray, cpus)
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
    """What a worker does; it is imported there, so both sides must have the same rankscope."""
    if version != __version__:
        reason = f"The worker has rankscope {__version__}, the sweep was started with {version}. Install one version."
        return None, failed(task, RankscopeError(reason)).facts
    outcome = do(replace(task, text=text))
    return outcome.table, {**outcome.facts, "asked_bytes": memory}


class _Texts:
    """Each text once in Ray's store, however many tasks read it."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._known: dict[str, Any] = {}

    def of(self, task: Task) -> Any:
        """What stands for the text of a task; None where it has none."""
        if task.text is None:
            return None
        digest = task.facts["inputs"]["text_sha256"]
        if digest not in self._known:
            self._known[digest] = self._ray.put(task.text)
        return self._known[digest]


class _Sizes:
    """The size of each model once: from headers here, or on the meta device in a worker, which imports torch anyway."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._known: dict[tuple[str, str | None], TaskSize | None] = {}

    def of(self, task: Task) -> TaskSize | None:
        """The size of a task's model; None where it cannot be told without loading it."""
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
                return None  # the task itself will say what is wrong with its files
        try:
            found: TaskSize = self._ray.get(
                self._ray.remote(size_on_meta).options(num_cpus=1).remote(spec, model_class)
            )
        except self._ray.exceptions.RayError:
            return None
        return found


def _largest_node(ray: Any, cpus: float) -> float:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [node.get("memory", 0.0) for node in nodes if node.get("CPU", 0) >= cpus]
    if not fitting:
        most = max((node.get("CPU", 0) for node in nodes), default=0)
        raise InputError(f"Each task asks for {cpus:g} cores (cpus in the plan) and the largest node has {most:g}.")
    return float(max(fitting))


def _too_large(memory: int, largest: float) -> str:
    return (
        f"It needs about {memory / 2**30:.1f} GiB and the largest node has {largest / 2**30:.1f} GiB for tasks. Use a "
        "larger node, a smaller batch or dtype, or set memory in the plan if the estimate is too high."
    )
