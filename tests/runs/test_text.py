"""What people read in a terminal or a notebook."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rankscope.errors import UnknownNameError
from rankscope.runs.summary import summarise
from rankscope.views import number
from tests.runs.builders import make_run, profile

GOLDEN = Path(__file__).parents[1] / "golden"


def test_plain_text_is_as_recorded() -> None:
    writer = profile({"relative_residual": [0.93]}, site="block.in", floor_below=1e-7)
    curves = {
        "relative_residual": [0.9, 0.4, 3e-8],
        "mean_cosine": [0.1, 0.8, 1.0],
        "stable_rank": [23.4, 1.12, math.nan],
    }
    run = make_run(profile(curves, floor_below=1e-7, writer=writer).table(), notes=("sample text",))
    assert str(run) + "\n" == (GOLDEN / "run.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.0115, "0.0115"),
        (0.4567, "0.457"),
        (0.99999, "1.00"),
        (9.999, "10.0"),
        (-0.002, "-0.0020"),
        (1.9e-7, "1.90e-07"),
        (1234.5, "1.23e+03"),
        (math.nan, "undefined"),
        (math.inf, "undefined"),
    ],
)
def test_numbers(value: float, shown: str) -> None:
    assert number(value) == shown


def test_summary_keeps_undefined_and_not_measured_apart() -> None:
    writer = profile({"relative_residual": [0.9, math.nan]})
    profile({"attention_entropy": [0.4]}, site="attention.probs", writer=writer)
    (grid,) = summarise(writer.table())
    assert grid.labels == ("0", "1")
    assert grid.sites == ("block.out", "attention.probs")
    assert grid.measured.tolist() == [[True, True], [True, False]]
    assert math.isnan(grid.values[1, 0])


def test_unknown_columns_are_named() -> None:
    table = profile({"relative_residual": [0.9]}).table()
    with pytest.raises(UnknownNameError, match="Did you mean 'relative_residual'"):
        summarise(table, metrics=["relative_residal"])
    with pytest.raises(UnknownNameError, match="site"):
        summarise(table, site="block.in")


def test_an_empty_run_still_prints() -> None:
    run = make_run(profile({}).table())
    assert "No verdict" in str(run)
    assert "No verdict" in run._repr_html_()
