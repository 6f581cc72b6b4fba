"""Runs tasks: loads the model, runs the verb, and stores the rows of a chunk with columns that say whose they are."""

from __future__ import annotations

import json
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rankscope._files import sha256_of
from rankscope.errors import RankscopeError
from rankscope.ext.sweeps.results import Chunk, Results
from rankscope.ext.sweeps.tasks import COORDINATES, RECORD, Task, differs, identity_of
from rankscope.models.loading.named import no_named_code
from rankscope.options import OFFLOAD
from rankscope.runs._frozen import thaw
from rankscope.verbs._spec import VERBS

if TYPE_CHECKING:
    from rankscope.runs.run import Run

TRANSIENT = (OSError, MemoryError)
"""Errors after which a task is retried; any other would only occur again."""
LONGEST_TRACE = 20_000


@dataclass(frozen=True)
class Limits:
    """How the tasks of a plan are run.

    Attributes:
        retries: after an error that may pass, and after the loss of a worker.
        timeout: seconds that a task may take; None for any.
        cpus: cores of a task, on Ray.
    """

    retries: int = 3
    timeout: float | None = None
    cpus: float = 1


Work = Callable[[Task, dict[Any, Any]], tuple[pa.Table, dict[str, Any]]]
"""Runs a task; gives its rows and its record. It may keep a model for the next task of the chunk."""


class TaskTimeoutError(RankscopeError):
    """A task took longer than the plan allows."""


@no_named_code("a plan")
def run_chunk(
    chunk: Chunk,
    results: Results,
    limits: Limits,
    *,
    refused: Mapping[str, str] | None = None,
    asked: int | None = None,
    work: Work | None = None,
) -> Counter[str]:
    """Run the tasks of a chunk in this process and store what came of them.

    Args:
        chunk: the tasks.
        results: where to.
        limits: of each task.
        refused: why a task is not run, by key.
        asked: bytes that were reserved.
        work: runs a task; :func:`do` by default.

    Returns:
        How many tasks were done, and how many failed.

    Raises:
        ResultError: the results could not be stored.
    """
    models: dict[Any, Any] = {}
    tables: list[pa.Table] = []
    failures: list[dict[str, Any]] = []
    for task in chunk.tasks:
        started = time.perf_counter()
        try:
            if refused and task.key in refused:
                raise RankscopeError(refused[task.key])
            table, record = _tried(task, models, limits, work or do)
            tables.append(rows_of(task, table, {**record, "asked_bytes": asked}))
        except Exception as error:  # noqa: BLE001  (a model can fail in any way; the other tasks continue)
            models.clear()  # it may be in the middle of a change
            failures.append(failure_of(task, error, time.perf_counter() - started))
    results.keep(chunk.name, tables, failures)
    return Counter(done=len(tables), failed=len(failures))


def _tried(task: Task, models: dict[Any, Any], limits: Limits, work: Work) -> tuple[pa.Table, dict[str, Any]]:
    """Run a task, again after an error that may pass."""
    for left in range(limits.retries, -1, -1):
        try:
            with _at_most(limits.timeout):
                return work(task, models)
        except TRANSIENT:
            models.clear()
            if not left:
                raise
    raise AssertionError("unreachable")


@contextmanager
def _at_most(seconds: float | None) -> Iterator[None]:
    """Raise TaskTimeoutError in the block after so many seconds; it cannot end a call into C that never returns."""
    in_main = threading.current_thread() is threading.main_thread()
    if seconds is None or not in_main or not hasattr(signal, "setitimer"):
        yield
        return

    def late(number: int, frame: object) -> None:
        raise TaskTimeoutError(f"It took longer than {seconds:g} s, the timeout of the plan.")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def do(task: Task, models: dict[Any, Any]) -> tuple[pa.Table, dict[str, Any]]:
    """Run a task in this process.

    Args:
        task: the task.
        models: the model of the task before, which is used again if it is the same.

    Returns:
        The rows, and the record: verdict, provenance and cost.
    """
    started = time.perf_counter()
    facts = task.facts
    if differs(facts["weights"], identity_of(task.spec, facts["revision"])):
        raise RankscopeError(
            f"{facts['spec']} has other files here than where the sweep was started. Every machine must see the same "
            "weights at the same path."
        )
    if task.text is not None and sha256_of(task.text) != facts["inputs"]["text_sha256"]:
        raise RankscopeError(f"{task.text} is another text here than where the sweep was started.")
    run = _run(task, models)
    record = {
        "verdict": run.verdict,
        "code": run.code,
        "evidence": thaw(run.evidence),
        "floor": thaw(run.floor),
        "notes": list(run.notes),
        "provenance": run.provenance.to_json(),
        "rows": run.table.num_rows,
        "seconds": round(time.perf_counter() - started, 4),
        "peak_bytes": _peak(),
        "finished": _now(),
    }
    return run.table, record


def _run(task: Task, models: dict[Any, Any]) -> Run:
    from rankscope.models.inputs import Inputs

    facts = task.facts
    settings = facts["inputs"]
    verb = VERBS[facts["verb"]]
    function: Callable[..., Run] = verb.run()
    options = {**verb.in_plans_always, **facts["options"]}
    taken = {name: value for name, value in settings.items() if name != "texts" and verb.takes(name)}
    if verb.subject == "design":
        return function(task.spec, seed=facts["seed"], **{**taken, **options})
    how = {"blocks": facts["blocks"], "seed": facts["seed"], "dtype": facts["dtype"]}
    if options.pop(OFFLOAD.name, False):
        place = f"{task.spec}@{facts['revision']}" if facts["revision"] else task.spec
        how |= {"offload": True}
    else:
        place, how = task.spec, {**how, "revision": facts["revision"], "model_class": facts["model_class"]}
    # Neighbours in a plan share their model, so the last one is enough; it loads its weights once.
    which = json.dumps([place, how, facts["weights"]], sort_keys=True)
    if which not in models:
        from rankscope.models.model import Model

        models.clear()
        models[which] = Model(place, **how)
    given = settings.get("texts") if task.text is None else Path(task.text)
    surgery = {"surgery": facts["operation"]} if facts["operation"] else {}
    return function(models[which], Inputs(given, **taken), **surgery, **options)


def failure_of(task: Task, error: BaseException, seconds: float | None = None) -> dict[str, Any]:
    """The facts about a task that raised ``error``."""
    words = " ".join(str(error).split()) or type(error).__name__
    trace = "" if isinstance(error, RankscopeError) else "".join(traceback.format_exception(error))[-LONGEST_TRACE:]
    facts = {"task": task.key, "reason": words[:2000], "type": type(error).__name__, "trace": trace}
    return {**facts, "seconds": seconds, "finished": _now()}


def rows_of(task: Task, table: pa.Table, record: Mapping[str, Any]) -> pa.Table:
    """The rows of a finished task as they are stored: with the task's columns, and its record in the first row.

    A task without rows has one without a metric, which marks it as done.
    """
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    for name, column in columns.items():
        if pa.types.is_dictionary(column.type):  # plain strings, which every Parquet reader supports
            columns[name] = column.cast(pa.string())
    count = table.num_rows
    if not count:
        columns, count = {name: pa.nulls(1, column.type) for name, column in columns.items()}, 1
    for name, kind in COORDINATES.items():
        if name not in columns:  # ablate has its own variants
            value = task.key if name == "task" else task.facts.get(name)
            columns[name] = pa.repeat(pa.scalar(value, kind), count)
    text = json.dumps(record, separators=(",", ":"))
    columns[RECORD] = pa.array([text] + [None] * (count - 1), pa.string())
    order = [*COORDINATES, *(name for name in columns if name not in COORDINATES)]
    return pa.table({name: columns[name] for name in order})


def _peak() -> int | None:
    """Peak memory of this process so far, in bytes; None if the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    from sys import platform

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if platform == "darwin" else 1024)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")
