"""Runs one task: loads the model, runs the verb, and adds the columns that identify the task to its rows."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rankscope.errors import RankscopeError
from rankscope.ext.sweeps.tasks import Task, differs, identity_of, identity_of_states
from rankscope.options import OFFLOAD, WEIGHTS_ONLY
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
        table: its rows; None if it failed.
        facts: verdict, provenance and cost, or the reason for the failure.
    """

    task: Task
    table: pa.Table | None = field(repr=False)
    facts: dict[str, Any] = field(repr=False)


def do(task: Task) -> Outcome:
    """Run a task in this process. A failure that a retry could fix is raised; any other is returned as an outcome.

    Raises:
        OSError, MemoryError: passed on unchanged.
    """
    started = time.perf_counter()
    try:
        _same_weights(task)
        run = _run(task)
        table = rows_of(run, task)
    except TRANSIENT:
        raise
    except Exception as error:  # noqa: BLE001  (a model can fail in any way; the other tasks continue)
        return failed(task, error, time.perf_counter() - started)
    facts = {
        "state": "done",
        "verdict": run.verdict,
        "code": run.code,
        "evidence": _plain(thaw(run.evidence)),
        "floor": _plain(thaw(run.floor)),
        "notes": list(run.notes),
        "provenance": run.provenance.to_json(),
        **_traffic(run),
        "seconds": round(time.perf_counter() - started, 4),
        "peak_bytes": _peak(),
        "finished": _now(),
    }
    return Outcome(task, table, facts)


def _traffic(run: Run) -> dict[str, int]:
    """Bytes that were read from a server, and that were not because another model has them too."""
    facts = {**run.extra.get("offload", {}), **run.extra.get("weights", {})}
    return {name: int(facts[name]) for name in TRAFFIC if name in facts}


def failed(task: Task, error: BaseException, seconds: float | None = None) -> Outcome:
    """The outcome of a task that raised ``error``."""
    words = " ".join(str(error).split()) or type(error).__name__
    trace = "" if isinstance(error, RankscopeError) else "".join(traceback.format_exception(error))[-LONGEST_TRACE:]
    facts = {"state": "failed", "reason": words[:2000], "type": type(error).__name__, "trace": trace}
    return Outcome(task, None, {**facts, "seconds": seconds, "finished": _now()})


def rows_of(run: Run, task: Task) -> pa.Table:
    """The rows of a run with the task's columns; names as plain strings, which every Parquet reader supports."""
    table = run.table
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    for name, column in columns.items():
        if pa.types.is_dictionary(column.type):
            columns[name] = column.cast(pa.string())
    count = table.num_rows
    coordinates: dict[str, pa.DataType] = {"task": pa.string(), "model": pa.string(), "checkpoint": pa.string(),
                                           "step": pa.int64(), "variant": pa.string(), "seed": pa.int64()}  # fmt: skip
    values = {**task.facts, "task": task.key}
    for name, kind in coordinates.items():
        if name not in columns:  # ablate has its own variants
            columns[name] = pa.nulls(count, kind) if values[name] is None else _constant(values[name], kind, count)
    order = [*coordinates, *(name for name in columns if name not in coordinates)]
    return pa.table({name: columns[name] for name in order})


def _constant(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    return pa.array([value], kind).take(pa.array([0] * count, pa.int32()))


def _same_weights(task: Task) -> None:
    facts = task.facts
    here = identity_of_states(task.spec) if "states" in facts else identity_of(task.spec, facts["revision"])
    if differs(task.facts["weights"], here):
        raise RankscopeError(
            f"{task.facts['spec']} has other files here than where the sweep was started. Every machine must see the "
            "same weights at the same path."
        )


def _run(task: Task) -> Run:
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
    if facts["options"].get(WEIGHTS_ONLY.name):
        return function(task.spec, **facts["options"])
    from rankscope.models.inputs import Inputs
    from rankscope.models.model import Model

    how = {"blocks": facts["blocks"], "seed": facts["seed"], "dtype": facts["dtype"]}
    offload = own.pop(OFFLOAD.name, False)
    if offload:
        place = f"{task.spec}@{facts['revision']}" if facts["revision"] else task.spec
        model = Model(place, offload=True, **how)
    else:
        model = Model(task.spec, revision=facts["revision"], model_class=facts["model_class"], **how)
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
