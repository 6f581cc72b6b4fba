"""A run beside itself made again."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa

from rankscope.runs.reruns import judge_rerun
from rankscope.runs.run import Run
from tests.runs.builders import make_run, profile


def run_of(levels: list[float]) -> Run:
    return make_run(profile({"relative_residual": levels}).table())


def with_value(run: Run, row: int, value: float) -> Run:
    values = run.table["value"].to_numpy().copy()
    values[row] = value
    place = run.table.column_names.index("value")
    return replace(run, table=run.table.set_column(place, "value", pa.array(values)))


def test_the_same_run_is_the_same() -> None:
    found = judge_rerun(run_of([0.9, 0.5]), run_of([0.9, 0.5]))
    assert found.same
    assert str(found) == f"The same to the bit: {found.rows} rows."


def test_one_bit_is_a_difference() -> None:
    old = run_of([0.9, 0.5])
    level = float(old.table["value"][0].as_py())
    found = judge_rerun(old, with_value(old, 0, math.nextafter(level, 2.0)))
    assert (found.same, found.differing) == (False, 1)
    assert 0 < found.largest["relative_residual"] < 3e-16


def test_undefined_equals_undefined_and_zero_is_not_minus_zero() -> None:
    old = run_of([0.9, 0.5])
    assert judge_rerun(with_value(old, 0, math.nan), with_value(old, 0, math.nan)).same
    assert not judge_rerun(with_value(old, 0, 0.0), with_value(old, 0, -0.0)).same


def test_other_rows_and_versions_are_named() -> None:
    old, new = run_of([0.9, 0.5]), run_of([0.9, 0.5, 0.4])
    new = replace(new, provenance=replace(new.provenance, versions={"torch": "9.9"}))
    found = judge_rerun(old, new)
    assert found.differing == found.rows
    assert any("rows are others" in reason for reason in found.reasons)
    assert any("torch" in reason and "9.9 now" in reason for reason in found.reasons)
    assert np.isfinite(found.to_json()["rows"])
