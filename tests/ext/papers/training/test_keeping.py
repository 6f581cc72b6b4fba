"""Pieces of work kept in files; means with intervals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import scipy.stats

from rankscope.errors import ResultError
from rankscope.ext.papers._curves import mean_interval
from rankscope.ext.papers.measuring.parts import Row, saved_rows, write_rows
from rankscope.runs.rows import RowWriter


class Worker:
    """Counts how often it works."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> list[Row]:
        self.calls += 1
        return [{"metric": "accuracy", "layer": 1, "value": 0.25 * self.calls, "seed": 3}]


def test_a_piece_is_made_once_under_the_same_facts(tmp_path: Path) -> None:
    work = Worker()
    first = saved_rows(tmp_path / "new", "piece", {"steps": 3}, work)
    assert saved_rows(tmp_path / "new", "piece", {"steps": 3}, work) == first
    assert work.calls == 1
    assert saved_rows(tmp_path / "new", "piece", {"steps": 4}, work) != first
    assert work.calls == 2
    assert not list((tmp_path / "new").glob("*.part"))


def test_nothing_is_kept_without_a_folder(tmp_path: Path) -> None:
    work = Worker()
    saved_rows(None, "piece", {}, work)
    saved_rows(None, "piece", {}, work)
    assert work.calls == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["[]", '{"digest": "other", "rows": []}'])
def test_a_file_of_something_else_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "piece.json").write_text(text)
    rows = saved_rows(tmp_path, "piece", {}, Worker())
    assert json.loads((tmp_path / "piece.json").read_text())["rows"] == rows


def test_rows_become_a_table_with_their_coordinates() -> None:
    writer = RowWriter(coordinates=("seed",))
    write_rows(writer, [{"metric": "loss", "layer": 2, "value": 0.5, "seed": 7, "sequence": 4, "site": "final"}])
    (row,) = writer.table().to_pylist()
    assert (row["metric"], row["layer"], row["value"], row["seed"], row["sequence"]) == ("loss", 2, 0.5, 7, 4)
    with pytest.raises(ResultError, match="announced"):
        write_rows(writer, [{"metric": "loss", "layer": 2, "value": 0.5, "colour": "red", "site": "final"}])


@pytest.mark.parametrize("number", [2, 3, 5, 10])
def test_the_interval_is_students(number: int) -> None:
    values = [math.sin(3.0 * place) for place in range(number)]
    found = mean_interval(values)
    low, high = scipy.stats.t.interval(0.95, number - 1, loc=sum(values) / number, scale=scipy.stats.sem(values))
    assert found.low == pytest.approx(low, rel=1e-3)
    assert found.high == pytest.approx(high, rel=1e-3)


def test_one_value_has_no_interval() -> None:
    assert mean_interval([0.5]).half == math.inf
    assert str(mean_interval([0.5])) == "0.500"
