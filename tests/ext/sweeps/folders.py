"""Folders of sweeps made by hand, so that tests of reading need no model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope.ext.sweeps.folder import Expected, SweepFolder

FACTS = {"state": "done", "verdict": "No collapse: all is well.", "evidence": [{"code": "healthy"}], "seconds": 0.5}
FACTS |= {"provenance": {"parameters": 1000, "weights_dtype": "float32"}, "peak_bytes": 7}


def task(number: int, **facts: Any) -> Expected:
    """A task with a key of its own."""
    described = {"verb": "measure", "model": "one", "checkpoint": None, "step": None, "variant": "full", "seed": 0}
    return Expected(f"{number:024x}", {**described, **facts})


def rows(one: Expected, values: Mapping[str, list[float]], **columns: str) -> pa.Table:
    """Values of each metric by layer, two sequences."""
    found: dict[str, list[Any]] = {"metric": [], "layer": [], "sequence": [], "value": []}
    for metric, course in values.items():
        for layer, value in enumerate(course):
            for sequence in range(2):
                for name, entry in zip(found, (metric, layer, sequence, value + 0.01 * sequence), strict=True):
                    found[name].append(entry)
    count = len(found["value"])
    constant = {name: one.task[name] for name in ("model", "checkpoint", "step", "variant", "seed")}
    table = {"task": one.key, **constant, "site": "block.out", "status": "ok", **columns}
    kinds = {"step": pa.int64(), "seed": pa.int64()}
    arrays = {name: pa.array([value] * count, kinds.get(name, pa.string())) for name, value in table.items()}
    arrays |= {"metric": pa.array(found["metric"]), "layer": pa.array(found["layer"], pa.int32())}
    arrays |= {"sequence": pa.array(found["sequence"], pa.int64()), "value": pa.array(found["value"], pa.float64())}
    arrays |= {"stack": pa.nulls(count, pa.string()), "head": pa.nulls(count, pa.int32())}
    return pa.table(arrays)


def made(home: Path, finished: Mapping[Expected, pa.Table] | list[tuple[Expected, pa.Table]],
         failed: Mapping[str, str] | None = None, missing: int = 0, **facts: Any) -> SweepFolder:  # fmt: skip
    """A folder with finished, failed and missing tasks."""
    pairs = list(finished.items()) if isinstance(finished, Mapping) else finished
    lost = [(task(1000 + i, model=name), why) for i, (name, why) in enumerate((failed or {}).items())]
    waiting = [task(2000 + i, model="later") for i in range(missing)]
    folder = SweepFolder(home)
    folder.begin([*(one for one, _ in pairs), *(one for one, _ in lost), *waiting])
    for one, table in pairs:
        folder.keep_rows(one, table, {**FACTS, **facts})
    for one, why in lost:
        folder.keep_failure(one, {"state": "failed", "reason": why, "type": "LoadError"})
    return folder
