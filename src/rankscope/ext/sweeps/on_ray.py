"""Runs chunks on Ray: as many at a time as cores and memory allow, again if a worker or a node is lost."""

from __future__ import annotations

import os
import socket
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rankscope._version import __version__
from rankscope.errors import InputError, MissingExtraError, RankscopeError
from rankscope.ext.sweeps.results import Chunk, Results
from rankscope.ext.sweeps.sizing import TaskSize, memory_for, size_of_folder, size_on_meta
from rankscope.ext.sweeps.working import Limits, Work, failure_of, run_chunk

OBJECT_STORE = 128 * 2**20
KNOCK_SECONDS = 10.0
AHEAD = 4
"""Chunks handed to Ray per core; more would only wait there."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextmanager
def cluster(address: str | None, workers: int | None) -> Iterator[Any]:
    """Ray, connected to ``address``, to the cluster this process already uses, or to a new local one.

    A cluster started here is also stopped here.

    Raises:
        InputError: nothing answers at ``address``.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("rankscope sweep (without --serial)", "ray", "sweep") from error
    if ray.is_initialized():
        yield ray
        return
    settings: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "address": address}
    if address is None:
        settings |= {"address": "local", "num_cpus": workers, "include_dashboard": False}
        settings["object_store_memory"] = OBJECT_STORE
    else:
        _knock(address)
    # Ray would put the current folder first on the import path of the workers, which would then run any torch.py in it.
    # They do not need it, because the paths of a task are absolute. Leaving the folder during the start is enough.
    here = os.getcwd()
    os.chdir(Path(here).anchor)
    try:
        ray.init(**settings)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = "here" if address is None else f"at {address}"
        words = " ".join(str(error).split())[:300]
        raise InputError(f"Ray could not be reached {where}: {words} Try --serial, which needs no Ray.") from error
    finally:
        os.chdir(here)
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Fail quickly if nothing listens at the address; Ray itself ends the process after minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return  # "auto", or another keyword of Ray
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"Ray could not be reached at {address}: {error}. Start it there with `ray start --head`, or try --serial."
        ) from error


def on_ray(
    ray: Any, waiting: Sequence[Chunk], results: Results, limits: Limits, work: Work | None
) -> Iterator[Counter[str]]:
    """Yield what came of each chunk; the workers store the rows themselves.

    What a lost worker or node had is run again by Ray. A chunk whose workers keep dying is run task by task, so that a
    task that ends its process costs only itself.
    """
    remote, size_of = ray.remote(_work), _sizes(ray)
    largest = _largest_node(ray, limits.cpus)
    # Submit only a few chunks per core ahead of time: a plan can have many thousands.
    ahead = max(2, int(AHEAD * ray.cluster_resources().get("CPU", 1) / limits.cpus))
    queue, pending = deque(waiting), dict[Any, Chunk]()
    while queue or pending:
        while queue and len(pending) < ahead:
            chunk = queue.popleft()
            # Reserve what the largest task needs that fits on a node; the others fail with a reason.
            needed = {}
            for task in chunk.tasks:
                size = size_of(task.spec, task.facts.get("model_class")) if task.memory is None else None
                needed[task.key] = task.memory or memory_for(size, task.facts)
            refused = {key: _too_large(memory, largest) for key, memory in needed.items() if memory > largest}
            memory = max((memory for key, memory in needed.items() if key not in refused), default=0)
            sized = remote.options(num_cpus=limits.cpus, memory=memory or None, max_retries=limits.retries)
            place = results.place.root if results.place.is_local else results.place.name
            pending[sized.remote(chunk, place, limits, refused, memory, __version__, work)] = chunk
        for ready in ray.wait(list(pending), num_returns=1)[0]:
            chunk = pending.pop(ready)
            try:
                yield ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, RankscopeError):
                    raise error.cause from None
                raise RankscopeError(f"A worker failed: {' '.join(str(error.cause).split())[:500]}") from error
            except ray.exceptions.RayError as error:  # its worker died, again and again
                if len(chunk.tasks) > 1:
                    queue.extendleft(Chunk((task,)) for task in reversed(chunk.tasks))
                    continue
                words = f"Its worker died {limits.retries + 1} times. {' '.join(str(error).split())}"
                results.keep(chunk.name, [], [failure_of(chunk.tasks[0], RankscopeError(words))])
                yield Counter(failed=1)


def _work(
    chunk: Chunk, place: str, limits: Limits, refused: dict[str, str], memory: int, version: str, work: Work | None
) -> Counter[str]:
    """Runs in a worker, which imports it; both sides must have the same version of rankscope."""
    if version != __version__:
        raise RankscopeError(
            f"A worker has rankscope {__version__}, the sweep was started with {version}. Install one version."
        )
    return run_chunk(chunk, Results.at(place), limits, refused=refused, asked=memory, work=work)


def _sizes(ray: Any) -> Any:
    """A function that gives the size of a model; None if it is unknown without loading the model."""

    @cache
    def size_of(spec: str, model_class: str | None) -> TaskSize | None:
        if not spec.startswith("init:"):
            return size_of_folder(Path(spec))
        try:
            # In a worker, which imports torch anyway.
            size: TaskSize = ray.get(ray.remote(size_on_meta).options(num_cpus=1).remote(spec, model_class))
        except ray.exceptions.RayError:
            return None
        return size

    return size_of


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
