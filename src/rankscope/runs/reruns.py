"""Compares a run with its rerun: bitwise equal, or where and by how much they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from rankscope.runs.curves import names_in
from rankscope.runs.run import Run
from rankscope.views import number


@dataclass(frozen=True)
class Rerun:
    """Result of the comparison.

    Attributes:
        same: whether all values and statuses are bitwise equal.
        rows: number of rows of the old run.
        differing: number of rows that differ; all of them if the runs do not have the same rows.
        largest: largest relative difference of each metric that differs.
        reasons: what else changed: versions, platform, rows.
    """

    same: bool
    rows: int
    differing: int
    largest: Mapping[str, float]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        if self.same:
            return f"The same to the bit: {self.rows} rows."
        parts = [f"Not the same: {self.differing} of {self.rows} rows differ."]
        parts += [f"  {name}: by up to {number(size)} (relative)" for name, size in self.largest.items()]
        return "\n".join((*parts, *(f"  {reason}" for reason in self.reasons)))

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON types."""
        return {
            "same": self.same,
            "rows": self.rows,
            "differing": self.differing,
            "largest": dict(self.largest),
            "reasons": list(self.reasons),
        }


def judge_rerun(old: Run, new: Run) -> Rerun:
    """Compare two runs row by row, in order.

    Values are compared bitwise, so NaN equals NaN and 0.0 does not equal -0.0.
    """
    reasons = _changes(old, new)
    if _keys(old) != _keys(new):
        words = f"the rows are others: {old.table.num_rows} then, {new.table.num_rows} now"
        return Rerun(False, old.table.num_rows, old.table.num_rows, {}, (words, *reasons))
    before, after = (np.asarray(run.table["value"].to_numpy(), dtype=np.float64) for run in (old, new))
    status = np.array(old.table["status"].to_pylist()) != np.array(new.table["status"].to_pylist())
    differs = (before.view(np.int64) != after.view(np.int64)) | status
    if not differs.any():
        return Rerun(True, old.table.num_rows, 0, {}, ())
    return Rerun(False, old.table.num_rows, int(differs.sum()), _largest(old, before, after), reasons)


def _keys(run: Run) -> list[dict[str, Any]]:
    names = [name for name in run.table.column_names if name not in ("value", "status")]
    keys: list[dict[str, Any]] = run.table.select(names).to_pylist()
    return keys


def _largest(old: Run, before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> dict[str, float]:
    with np.errstate(invalid="ignore", divide="ignore"):
        change = np.abs(after - before) / np.maximum(np.abs(before), np.abs(after))
    largest = {}
    for name in names_in(old.table, "metric"):
        mine = pc.equal(old.table["metric"], name).to_numpy().astype(bool)
        size = float(np.nanmax(change[mine], initial=0.0))
        if size > 0:
            largest[name] = size
    return largest


def _changes(old: Run, new: Run) -> tuple[str, ...]:
    """What else changed between the runs."""
    was, now = old.provenance, new.provenance
    changes = [
        f"{name} {was.versions.get(name, 'absent')} then, {now.versions.get(name, 'absent')} now"
        for name in sorted({*was.versions, *now.versions})
        if was.versions.get(name) != now.versions.get(name)
    ]
    others = ("python", "platform", "config_hash", "weights_dtype", "attention")
    changes += [
        f"{name.replace('_', ' ')} {getattr(was, name)} then, {getattr(now, name)} now"
        for name in others
        if getattr(was, name) != getattr(now, name)
    ]
    return tuple(changes)
