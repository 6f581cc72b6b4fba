"""Reads what ``blockstats`` flushed, one JSON object per line, as the record and the last run of a training.

Does not import torch. The smallest example, one flush of one block::

    {"step": 100, "loss": 3.2, "relative_residual/0": 0.97, "tokens/0": 8192.0, "not_finite/0": 0.0}
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope._files import open_regular
from rankscope._foreign_text import visible
from rankscope._types import Status
from rankscope.errors import ResultError
from rankscope.monitor.readings import LARGEST_WHOLE, LOSS, Alarm, LayerValue, Reading
from rankscope.monitor.record import LONGEST_LINE, Record
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import FIXED_COLUMNS
from rankscope.runs.run import Run
from rankscope.verdicts import Verdict, judge_rows

_KEY = re.compile(r"(relative_residual|between_groups|stream_rms|relative_write|largest|tokens|not_finite)/(\d{1,5})")
MAPPED = ("relative_residual", "between_groups", "stream_rms", "relative_write", "largest")
METRICS = ("relative_residual", "stream_rms")
"""What is also a metric of a run, pooled over all groups of tokens."""
FLOOR = {"dtype": "float32", "relative": 1e-7, "meaning": "means of groups are rounded to float32"}


def read_block_log(path: str | os.PathLike[str]) -> tuple[Record, Run]:
    """The training, flush by flush, and its last flush as a run of ``measure`` with a verdict.

    The verdict of every flush is that of ``measure``: the record has an alarm where tokens collapse, and one where
    values are not finite. Of a step that a resumed training flushed again, the last line counts.

    Raises:
        ResultError: the file cannot be read, a line is not a JSON object with a step, or no line has block statistics.
    """
    home = Path(path)
    flushes = {step: (layers, loss) for step, layers, loss in _flushes(home)}
    if not flushes:
        raise ResultError(f"{home} has no block statistics. Write a line for each flush: {{'step': step, **values}}.")
    readings: list[Reading] = []
    active: dict[str, int] = {}
    for step in sorted(flushes):
        layers, loss = flushes[step]
        table, verdict = _judged(layers)
        alarms = tuple(_alarms(step, layers, verdict, active))
        rows = tuple(
            LayerValue(name, "block.out", None, layer, value, value, value, _status(value))
            for layer, values in sorted(layers.items())
            for name, value in values.items()
            if name in MAPPED
        )
        scalars = {} if loss is None else {LOSS: loss}
        readings.append(Reading(step, scalars, rows, alarms, tuple(sorted(active))))
    provenance = Provenance(model=home.stem, origin="blockstats")
    run = Run(
        kind="measure",
        provenance=provenance,
        floor=FLOOR,
        verdict=verdict.sentence,
        table=table,
        evidence=verdict.evidence,
        notes=(f"The last flush, at step {step}: one value for all groups of tokens, not one for each sequence.",),
        extra={"verdict_details": verdict.details},
        code=verdict.code,
        next_steps=(),
        source=home,
    )
    return Record({"model": home.stem, "where": "blockstats"}, tuple(readings), 0, home.name), run


def _flushes(path: Path) -> Iterator[tuple[int, dict[int, dict[str, float]], float | None]]:
    """Step, values by block and name, and loss of each line with block statistics."""
    try:
        with open_regular(path) as lines:
            number = 0
            while line := lines.readline(LONGEST_LINE):
                number += 1
                if line.strip():
                    entry = _entry(line, f"{path}, line {number}")
                    layers: dict[int, dict[str, float]] = {}
                    for key, value in entry.items():
                        if (found := _KEY.fullmatch(key)) is not None:
                            layers.setdefault(int(found[2]), {})[found[1]] = float(value)
                    if layers:
                        loss = entry.get("loss")
                        yield entry["step"], layers, float(loss) if isinstance(loss, (int, float)) else None
    except OSError as error:
        raise ResultError(f"{path} cannot be read ({error.strerror}).") from error
    except (TypeError, ValueError) as error:
        raise ResultError(f"{path}, line {number}: a value is not a number ({visible(error)[:80]}).") from error


def _entry(line: bytes, where: str) -> Mapping[str, Any]:
    """The JSON object of one line; Python writes NaN where a block had no finite value, and that is read."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{where} is not JSON: {visible(error)[:80]}. Remove the line if it was cut off.") from error
    step = entry.get("step") if isinstance(entry, dict) else None
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < LARGEST_WHOLE:
        raise ResultError(f"{where} has no step: write {{'step': step, **stats.flush()}}.")
    found: dict[str, Any] = entry
    return found


def _status(value: float) -> str:
    return str(Status.OK if math.isfinite(value) else Status.NOT_FINITE)


def _judged(layers: Mapping[int, Mapping[str, float]]) -> tuple[pa.Table, Verdict]:
    """The rows of a flush that are metrics, and their verdict."""
    rows = [
        {"metric": name, "site": "block.out", "layer": layer, "sequence": 0, "value": value, "status": _status(value)}
        for name in METRICS
        for layer, values in sorted(layers.items())
        if (value := values.get(name)) is not None
    ]
    table = pa.Table.from_pylist(rows, schema=pa.schema(list(FIXED_COLUMNS.items())))
    return table, judge_rows(table, floor_relative=FLOOR["relative"])  # type: ignore[arg-type]


def _alarms(
    step: int, layers: Mapping[int, Mapping[str, float]], verdict: Verdict, active: dict[str, int]
) -> Iterator[Alarm]:
    """What starts or ends at this flush; ``active`` has the block of each alarm that has not ended."""
    residuals = {layer: values.get("relative_residual", math.nan) for layer, values in layers.items()}
    bad = [layer for layer, values in sorted(layers.items()) if values.get("not_finite")]
    collapsed = verdict.code == "collapsed"
    worst = min(residuals, key=lambda layer: math.inf if math.isnan(residuals[layer]) else residuals[layer])
    told = {
        "token_collapse": (collapsed, worst, f"Token collapse at layer {worst}, step {step}: {verdict.sentence}"),
        "not_finite": (bool(bad), min(bad, default=0), f"Values are not finite after blocks {bad}, step {step}."),
    }
    for name, (is_now, layer, words) in told.items():
        if is_now and name not in active:
            active[name] = layer
            value = residuals[layer] if name == "token_collapse" else layers[layer]["not_finite"]
            yield Alarm(name, "raised", step, None, layer, words, {name: value}, "unknown")
        elif not is_now and name in active:
            yield Alarm(name, "cleared", step, None, active.pop(name), f"{name} ended at step {step}.", {}, "unknown")
