"""Runs chunks on Ray: as many at a time as cores and memory allow, again if a worker or a node is lost."""

from __future__ import annotations

import os
import socket
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankscope._version import __version__
from rankscope.errors import InputError, MissingExtraError, RankscopeError
from rankscope.ext.sweeps.results import Chunk, Results
from rankscope.ext.sweeps.sizing import TaskSize, memory_for, size_from_headers, size_on_meta
from rankscope.ext.sweeps.tasks import Task
from rankscope.ext.sweeps.working import Limits, Work, failed, run_chunk

OBJECT_STORE = 128 * 2**20
KNOCK_SECONDS = 10.0
AHEAD = 4
"""Chunks handed to Ray per core; more would only wait there."""
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


def on_ray(
    ray: Any, waiting: Sequence[tuple[Chunk, bool]], results: Results, limits: Limits, work: Work
) -> Iterator[Counter[str]]:
    """Yield what came of each chunk; the workers store the rows themselves.

    What a lost worker or node had is run again by Ray. A chunk whose workers keep dying is run task by task, so that a
    task that ends its process costs only itself.
    """
    remote = ray.remote(_work)
    largest = _largest_node(ray, limits.cpus)
    # Submit only a few chunks per core ahead of time: a plan can have many thousands.
    ahead = max(2, int(AHEAD * ray.cluster_resources().get("CPU", 1) / limits.cpus))
    sizes, texts = _Sizes(ray), _Texts(ray)
    queue = deque(waiting)
    pending: dict[Any, Chunk] = {}
    while queue or pending:
        while queue and len(pending) < ahead:
            chunk, again = queue.popleft()
            needed = {task.key: task.memory or memory_for(sizes.of(task), task.facts) for task in chunk.tasks}
            refused = {key: _too_large(memory, largest) for key, memory in needed.items() if memory > largest}
            memory = max((memory for key, memory in needed.items() if key not in refused), default=0)
            sized = remote.options(num_cpus=limits.cpus, memory=memory or None, max_retries=limits.retries)
            # Texts are passed by reference; inside the tasks they would be copied for every chunk.
            bare = Chunk(tuple(replace(task, text=None) if task.text else task for task in chunk.tasks))
            digests = sorted({_digest(task) for task in chunk.tasks} - {""})
            place = results.place.root if results.place.is_local else results.place.name
            job = (bare, digests, place, limits, again, refused, memory, __version__, work)
            pending[sized.remote(job, *(texts.of(digest, chunk) for digest in digests))] = chunk
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
                    queue.extendleft((one, False) for one in reversed(chunk.singles()))
                    continue
                words = f"Its worker died {limits.retries + 1} times. {' '.join(str(error).split())}"
                results.keep(chunk.name, [], [failed(chunk.tasks[0], RankscopeError(words)).facts], again=False)
                yield Counter(failed=1)


def _work(job: tuple[Any, ...], *texts: str) -> Counter[str]:
    """Runs in a worker, which imports it; both sides must have the same version of rankscope."""
    bare, digests, place, limits, again, refused, memory, version, work = job
    if version != __version__:
        raise RankscopeError(
            f"A worker has rankscope {__version__}, the sweep was started with {version}. Install one version."
        )
    known = dict(zip(digests, texts, strict=True))
    tasks = tuple(replace(task, text=known[digest]) if (digest := _digest(task)) else task for task in bare.tasks)
    return run_chunk(Chunk(tasks), Results.at(place), limits, again=again, refused=refused, asked=memory, work=work)


def _digest(task: Task) -> str:
    """Hash of the text of a task; empty if it has none."""
    return str(task.facts.get("inputs", {}).get("text_sha256", ""))


class _Texts:
    """Puts each text into Ray's object store once, however many tasks read it."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._known: dict[str, Any] = {}

    def of(self, digest: str, chunk: Chunk) -> Any:
        """Reference to the text with this hash, which a task of the chunk has."""
        if digest not in self._known:
            self._known[digest] = self._ray.put(next(task.text for task in chunk.tasks if _digest(task) == digest))
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
