"""Rows keep every coordinate of every value."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa

from rankscope._types import Status
from rankscope.runs.rows import STATUS_CODE, RowWriter

COMMON = {"metric": "m", "site": "block.out", "stack": None, "layer": 2, "first_sequence": 5}


def test_rows_match_a_slow_loop() -> None:
    writer, expected = RowWriter(), []
    for layer in range(3):
        plain, heads = np.random.rand(4), np.random.rand(4, 2)
        shared = {"site": "s", "stack": "encoder", "layer": layer, "first_sequence": 10}
        writer.add(metric="a", values=plain, statuses=np.zeros(4, int), head_axis=False, **shared)
        writer.add(metric="b", values=heads, statuses=np.ones((4, 2), int), head_axis=True, **shared)
        expected += [("a", "s", "encoder", layer, None, 10 + i, plain[i], "ok") for i in range(4)]
        floor = "at the float floor"
        expected += [("b", "s", "encoder", layer, h, 10 + i, heads[i, h], floor) for i in range(4) for h in range(2)]
    rows = [tuple(row.values()) for row in writer.table().to_pylist()]
    assert rows == expected


def test_a_nan_without_a_reason_is_not_ok() -> None:
    writer = RowWriter()
    values = np.array([1.0, math.nan, math.inf, math.nan])
    codes = np.array([STATUS_CODE[s] for s in (Status.OK, Status.OK, Status.OK, Status.UNDEFINED)])
    writer.add(values=values, statuses=codes, head_axis=False, **COMMON)
    assert writer.table()["status"].to_pylist() == ["ok", "not finite", "not finite", "undefined"]
    assert writer.table()["value"].null_count == 0


def test_further_coordinates() -> None:
    writer = RowWriter(coordinates=("variant", "length"))
    one = {"values": np.ones(2), "statuses": np.zeros(2, int), "head_axis": False, **COMMON}
    writer.add(at={"variant": "pure", "length": 64}, **one)
    writer.add(at={"variant": "full"}, **one)
    table = writer.table()
    assert table["variant"].to_pylist() == ["pure", "pure", "full", "full"]
    assert table["length"].to_pylist() == [64, 64, None, None]
    assert table["length"].type == pa.int64()
