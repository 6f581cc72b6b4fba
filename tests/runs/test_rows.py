"""Rows keep every coordinate of every value."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from rankscope._types import Status
from rankscope.errors import ResultError
from rankscope.runs.rows import FIXED_COLUMNS, STATUS_CODE, RowWriter

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


def test_types_are_the_declared_ones_even_without_rows() -> None:
    for writer in (RowWriter(), RowWriter(coordinates=("mask",))):
        schema = writer.table().schema
        assert {name: schema.field(name).type for name in FIXED_COLUMNS} == dict(FIXED_COLUMNS)


def test_a_nan_without_a_reason_is_not_ok() -> None:
    writer = RowWriter()
    values = np.array([1.0, math.nan, math.inf, math.nan])
    codes = np.array([STATUS_CODE[s] for s in (Status.OK, Status.OK, Status.OK, Status.UNDEFINED)])
    writer.add(values=values, statuses=codes, head_axis=False, **COMMON)
    assert writer.table()["status"].to_pylist() == ["ok", "not finite", "not finite", "undefined"]
    assert writer.table()["value"].null_count == 0


def test_the_writer_keeps_its_own_copy() -> None:
    writer, values = RowWriter(), np.ones(2)
    writer.add(values=values, statuses=np.zeros(2, int), head_axis=False, **COMMON)
    values[:] = 7.0
    assert writer.table()["value"].to_pylist() == [1.0, 1.0]


def test_further_coordinates() -> None:
    writer = RowWriter(coordinates=("variant", "length"))
    one = {"values": np.ones(2), "statuses": np.zeros(2, int), "head_axis": False, **COMMON}
    writer.add(at={"variant": "pure", "length": 64}, **one)
    writer.add(at={"variant": "full"}, **one)
    table = writer.table()
    assert table["variant"].to_pylist() == ["pure", "pure", "full", "full"]
    assert table["length"].to_pylist() == [64, 64, None, None]
    assert table["length"].type == pa.int64()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"values": np.ones((2, 2))}, r"must have the shape \(sequences,\)"),
        ({"statuses": np.zeros(3, int)}, "statuses of shape"),
        ({"statuses": np.array([0, 9])}, "status code"),
        ({"statuses": np.array([0, -1])}, "status code"),
        ({"at": {"mask": "causal"}}, "were not announced"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], words: str) -> None:
    given = {"values": np.ones(2), "statuses": np.zeros(2, int), "head_axis": False, **COMMON, **change}
    with pytest.raises(ResultError, match=words):
        RowWriter().add(**given)


@pytest.mark.parametrize("names", [("layer",), ("mask", "mask")])
def test_a_further_column_has_a_name_of_its_own(names: tuple[str, ...]) -> None:
    with pytest.raises(ResultError, match="needs a unique name"):
        RowWriter(coordinates=names)


def test_values_announced_for_later_are_there_whenever_rows_are_read_and_in_order() -> None:
    def adding(writer: RowWriter, layer: int) -> None:
        writer.add(
            metric="mean_cosine",
            site="block.out",
            stack=None,
            layer=layer,
            first_sequence=0,
            values=np.array([0.5]),
            statuses=np.array([0]),
            head_axis=False,
        )

    writer = RowWriter()
    writer.add_later(lambda: adding(writer, 0))
    writer.add_later(lambda: adding(writer, 1))
    adding(writer, 2)
    writer.add_later(lambda: adding(writer, 3))
    assert [piece.layer for piece in writer.pieces] == [0, 1, 2, 3]
    writer.add_later(lambda: adding(writer, 4))
    assert writer.table()["layer"].to_pylist() == [0, 1, 2, 3, 4]
    writer.add_later(lambda: adding(writer, 5))
    writer.replace(writer.pieces[:1])
    assert [piece.layer for piece in writer.pieces] == [0]
