"""Runs tasks: loads the model, runs the verb, and stores the rows of a chunk with columns that say whose they are."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rankscope.errors import RankscopeError
from rankscope.ext.sweeps.results import ROWS, Chunk, Results
from rankscope.ext.sweeps.tasks import COORDINATES, RECORD, Task, differs, identity_of, identity_of_states
from rankscope.options import OFFLOAD
from rankscope.runs._frozen import thaw
from rankscope.verbs._spec import VERBS

if TYPE_CHECKING:
    from rankscope.runs.run import Run

TRANSIENT = (OSError, MemoryError)
"""Errors after which a task is retried; any other would only occur again."""
TRAFFIC = ("bytes_read",)
"""What is counted of a model on a server."""
LONGEST_TRACE = 20_000


@dataclass(frozen=True)
class Outcome:
    """The result of one task.

    Attributes:
        task: the task.
        table: rows of its run; None if it failed.
        facts: verdict, provenance and cost, or the reason for the failure.
    """

    task: Task
    table: pa.Table | None = field(repr=False)
    facts: dict[str, Any] = field(repr=False)


class TaskTimeoutError(RankscopeError):
    """A task took longer than the plan allows."""


def outcome_of(task: Task, models: dict[Any, Any], *, retries: int = 0, timeout: float | None = None) -> Outcome:
    """Run a task in this process; whatever it raises is in the outcome, after as many retries as may help.

    Args:
        task: the task.
        models: the model of the task before, which is used again if it is the same.
        retries: after an error of the disk, the network or memory.
        timeout: seconds after which the task fails.
    """
    started = time.perf_counter()
    for left in range(retries, -1, -1):
        try:
            with _at_most(timeout):
                return do(task, models)
        except TRANSIENT as error:
            models.clear()
            if not left:
                return failed(task, error, time.perf_counter() - started)
        except Exception as error:  # noqa: BLE001  (a model can fail in any way; the other tasks continue)
            models.clear()  # it may be in the middle of a change
            return failed(task, error, time.perf_counter() - started)
    raise AssertionError("unreachable")


@contextmanager
def _at_most(seconds: float | None) -> Iterator[None]:
    """Raise TaskTimeoutError in the block after so many seconds; it cannot end a call into C that never returns."""
    if seconds is None or threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
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


def do(task: Task, models: dict[Any, Any] | None = None) -> Outcome:
    """Run a task in this process; see :func:`outcome_of`, which also catches what this raises."""
    started = time.perf_counter()
    _same_weights(task)
    run = _run(task, {} if models is None else models)
    facts = {
        "verdict": run.verdict,
        "code": run.code,
        "evidence": _plain(thaw(run.evidence)),
        "floor": _plain(thaw(run.floor)),
        "notes": list(run.notes),
        "provenance": run.provenance.to_json(),
        "rows": run.table.num_rows,
        **_traffic(run),
        "seconds": round(time.perf_counter() - started, 4),
        "peak_bytes": _peak(),
        "finished": _now(),
    }
    return Outcome(task, run.table, facts)


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


Work = Callable[..., Outcome]


def run_chunk(
    chunk: Chunk,
    results: Results,
    limits: Limits,
    *,
    again: bool = False,
    refused: Mapping[str, str] | None = None,
    asked: int | None = None,
    work: Work = outcome_of,
) -> Counter[str]:
    """Run the tasks of a chunk in this process and store what came of them.

    Args:
        chunk: the tasks.
        results: where to.
        limits: of each task.
        again: whether files of an earlier run of the chunk are there; its finished tasks are kept.
        refused: why a task is not run, by key.
        asked: bytes that were reserved.
        work: runs a task.

    Raises:
        ResultError: the results could not be stored.
    """
    tables: list[pa.Table] = []
    finished: set[str] = set()
    if again and chunk.name in results.listed(ROWS):
        tables.append(results.table(ROWS, chunk.name))
        finished = set(tables[0]["task"].unique().to_pylist())
    models: dict[Any, Any] = {}
    failures: list[dict[str, Any]] = []
    counts: Counter[str] = Counter(done=len(finished))
    for task in chunk.tasks:
        if task.key in finished:
            continue
        if refused and task.key in refused:
            outcome = failed(task, RankscopeError(refused[task.key]))
        else:
            outcome = work(task, models, retries=limits.retries, timeout=limits.timeout)
        if outcome.table is None:
            failures.append(outcome.facts)
            counts["failed"] += 1
            continue
        if asked is not None:
            outcome.facts["asked_bytes"] = asked
        tables.append(rows_of(outcome))
        counts["done"] += 1
        counts.update({name: outcome.facts[name] for name in TRAFFIC if name in outcome.facts})
    results.keep(chunk.name, tables, failures, again=again)
    return counts


def _traffic(run: Run) -> dict[str, int]:
    """Bytes that were read from a server, and that were not because another model has them too."""
    facts = {**run.extra.get("offload", {}), **run.extra.get("weights", {})}
    return {name: int(facts[name]) for name in TRAFFIC if name in facts}


def failed(task: Task, error: BaseException, seconds: float | None = None) -> Outcome:
    """The outcome of a task that raised ``error``."""
    words = " ".join(str(error).split()) or type(error).__name__
    trace = "" if isinstance(error, RankscopeError) else "".join(traceback.format_exception(error))[-LONGEST_TRACE:]
    facts = {"task": task.key, "reason": words[:2000], "type": type(error).__name__, "trace": trace}
    return Outcome(task, None, {**facts, "seconds": seconds, "finished": _now()})


def rows_of(outcome: Outcome) -> pa.Table:
    """The rows of a finished task as they are stored: with the task's columns, and its record in the first row.

    A task without rows has one without a metric, which tells that it is done.
    """
    task, table = outcome.task, outcome.table
    assert table is not None
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
    record = json.dumps(outcome.facts, separators=(",", ":"))
    columns[RECORD] = pa.array([record] + [None] * (count - 1), pa.string())
    order = [*COORDINATES, *(name for name in columns if name not in COORDINATES)]
    return pa.table({name: columns[name] for name in order})


def _same_weights(task: Task) -> None:
    facts = task.facts
    here = identity_of_states(task.spec) if "states" in facts else identity_of(task.spec, facts["revision"])
    if differs(task.facts["weights"], here):
        raise RankscopeError(
            f"{task.facts['spec']} has other files here than where the sweep was started. Every machine must see the "
            "same weights at the same path."
        )


def _run(task: Task, models: dict[Any, Any]) -> Run:
    facts = task.facts
    verb = VERBS[facts["verb"]]
    settings = facts["inputs"]
    if "states" in facts:
        from rankscope.models.inputs import Inputs
        from rankscope.verbs.measure.run import judge

        options = {name: value for name, value in facts["options"].items() if name != OFFLOAD.name}
        inputs = Inputs(**settings, seed=facts["seed"])
        return judge(task.spec, inputs, computed_in=facts["dtype"], **facts["states"], **options)
    function: Callable[..., Run] = verb.run()
    own = {**verb.in_plans_always, **facts["options"]}
    if verb.subject == "design":
        taken = {name: value for name, value in settings.items() if verb.takes(name)}
        return function(task.spec, seed=facts["seed"], **{**taken, **own})
    from rankscope.models.inputs import Inputs
    from rankscope.models.model import Model

    how = {"blocks": facts["blocks"], "seed": facts["seed"], "dtype": facts["dtype"]}
    if own.pop(OFFLOAD.name, False):
        place = f"{task.spec}@{facts['revision']}" if facts["revision"] else task.spec
        how |= {"offload": True}
    else:
        place, how = task.spec, {**how, "revision": facts["revision"], "model_class": facts["model_class"]}
    # Neighbours in a plan share their model, so the last one is enough; it loads its weights once.
    which = json.dumps([place, how, facts["weights"]], sort_keys=True)
    if which not in models:
        models.clear()
        models[which] = Model(place, **how)
    model = models[which]
    taken = {name: value for name, value in settings.items() if name != "texts" and verb.takes(name)}
    with _inputs(task) as given:
        surgery = {"surgery": facts["operation"]} if facts["operation"] else {}
        return function(model, Inputs(given, **taken), **surgery, **own)


@contextmanager
def _inputs(task: Task) -> Iterator[Any]:
    """Texts, a file with the text named in the plan, or None for the built-in sample."""
    if task.text is None:
        yield task.facts["inputs"].get("texts")
        return
    with tempfile.TemporaryDirectory(prefix="rankscope-") as folder:
        path = Path(folder) / Path(task.facts["inputs"]["text"]).name
        path.write_text(task.text, encoding="utf-8")
        yield path


def _plain(value: Any) -> Any:
    """Replace values that are not finite, which JSON cannot represent."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _peak() -> int | None:
    """Peak memory of this process so far, in bytes; None if the system does not report it."""
    if sys.platform == "win32":
        return None
    import resource

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
