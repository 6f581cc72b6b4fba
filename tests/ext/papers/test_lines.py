"""Lines and comparisons on tables whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.errors import InputError
from rankscope.ext.papers._curves import PublishedLine, line
from rankscope.ext.papers.dong2021_fig2.show import compared
from rankscope.runs.rows import RowWriter


def table(values: dict[int, list[list[float]]]):
    """``values[seed][depth]`` is the list of sequences."""
    writer = RowWriter(coordinates=("curve", "seed"))
    for seed, by_depth in values.items():
        for depth, row in enumerate(by_depth):
            writer.add(
                metric="m",
                site="block.in" if depth == 0 else "block.out",
                stack=None,
                layer=max(depth - 1, 0),
                first_sequence=0,
                values=np.array(row),
                statuses=np.zeros(len(row), dtype=np.int8),
                head_axis=False,
                at={"curve": "a", "seed": seed},
            )
    return writer.table()


def test_spread_over_sequences_and_over_seeds_are_kept_apart() -> None:
    seen = line(table({0: [[1.0, 3.0], [5.0, 5.0]], 1: [[5.0, 7.0], [7.0, 7.0]]}), "m", curve="a")
    assert seen.depth.tolist() == [0, 1]
    assert seen.mean.tolist() == [4.0, 6.0]
    np.testing.assert_allclose(seen.over_sequences, [np.sqrt(2.0), 0.0])
    np.testing.assert_allclose(seen.over_seeds, [np.sqrt(8.0), np.sqrt(2.0)])
    assert (seen.seeds, seen.sequences) == (2, 2)


def test_no_rows_is_an_error_that_names_them() -> None:
    with pytest.raises(InputError, match="curve=b"):
        line(table({0: [[1.0]]}), "m", curve="b")


@pytest.mark.parametrize(("printed", "within"), [([0.5, 0.25], 2), ([0.5, 0.2], 1)])
def test_a_curve_outside_its_allowance_is_counted(printed: list[float], within: int) -> None:
    ours = line(table({0: [[0.5, 0.5], [0.25, 0.25]], 1: [[0.5, 0.5], [0.26, 0.26]]}), "m", curve="a")
    found = compared("M", "a", "words", ours, PublishedLine(np.array(printed), None), (0.01, 0.07))
    assert (found.within, found.compared, found.within_wide) == (within, 2, 2)


def test_rounding_in_print_is_not_compared() -> None:
    ours = line(table({0: [[0.5], [1e-7]]}), "m", curve="a")
    found = compared("M", "a", "words", ours, PublishedLine(np.array([0.5, 2e-7]), 1), (0.01, 0.07))
    assert found.compared == 1
    assert "also below 0.001" in found.rounding
