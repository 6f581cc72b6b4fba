"""Sweeps whose tasks are not run, so that tests of storing and reading need no model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope.errors import LoadError
from rankscope.ext.sweeps.results import Results
from rankscope.ext.sweeps.tasks import Task
from rankscope.ext.sweeps.working import Limits, run_chunk

FACTS = {"verdict": "No collapse: all is well.", "code": "healthy", "seconds": 0.5}
FACTS |= {"provenance": {"parameters": 1000, "weights_dtype": "float32"}, "peak_bytes": 7}


def task(number: int, **facts: Any) -> Task:
    """A task with a key of its own."""
    described = {"verb": "measure", "model": "one", "checkpoint": None, "step": None, "variant": "full", "seed": 0}
    return Task({**described, "number": number, **facts}, "nowhere", memory=2**20)


def rows(one: Task, values: Mapping[str, list[float]], **columns: str) -> pa.Table:
    """Values of each metric by layer, two sequences."""
    found: dict[str, list[Any]] = {"metric": [], "layer": [], "sequence": [], "value": []}
    for metric, course in values.items():
        for layer, value in enumerate(course):
            for sequence in range(2):
                for name, entry in zip(found, (metric, layer, sequence, value + 0.01 * sequence), strict=True):
                    found[name].append(entry)
    count = len(found["value"])
    table = {"site": "block.out", "status": "ok", **columns}
    arrays = {name: pa.array([value] * count, pa.string()) for name, value in table.items()}
    arrays |= {"metric": pa.array(found["metric"]), "layer": pa.array(found["layer"], pa.int32())}
    arrays |= {"sequence": pa.array(found["sequence"], pa.int64()), "value": pa.array(found["value"], pa.float64())}
    arrays |= {"stack": pa.nulls(count, pa.string()), "head": pa.nulls(count, pa.int32())}
    return pa.table(arrays)


def made(home: Path, finished: Mapping[Task, pa.Table] | list[tuple[Task, pa.Table]],
         failed_models: Mapping[str, str] | None = None, missing: int = 0, **facts: Any) -> Path:  # fmt: skip
    """A folder with finished, failed and missing tasks."""
    pairs = list(finished.items()) if isinstance(finished, Mapping) else finished
    lost = [task(1000 + i, model=name) for i, name in enumerate(failed_models or {})]
    waiting = [task(2000 + i, model="later") for i in range(missing)]
    tables = {one.key: table for one, table in pairs}
    results = Results.at(home)

    def work(one: Task, models: Any) -> tuple[pa.Table, dict[str, Any]]:
        if one.key not in tables:
            raise LoadError((failed_models or {})[one.facts["model"]])
        return tables[one.key], {**FACTS, "rows": tables[one.key].num_rows, **facts}

    for chunk in results.begin([*(one for one, _ in pairs), *lost, *waiting], 1):
        if chunk.tasks[0] not in waiting:
            run_chunk(chunk, results, Limits(), work=work)
    return home
