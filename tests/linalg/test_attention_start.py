"""The rows from which walks over long attention begin."""

from __future__ import annotations

import pytest
import torch

from rankscope.linalg.blockwise_attention import _some_rows


@pytest.mark.parametrize("rows", [1000, 5000, 40_000])
def test_some_rows_stand_for_all_of_them(rows: int) -> None:
    numbers, weights = _some_rows(rows, 256)
    places = torch.tensor(numbers)
    assert places[0] == 0
    assert places[-1] == rows - 1
    assert len(places) <= 256
    assert (places.diff() > 0).all()
    assert float(weights.sum()) == pytest.approx(rows)
    assert int(places.diff().max()) <= rows / 127 + 1, "evenly over the whole sequence"
    assert int((places < rows // 10).sum()) > len(places) // 4, "denser towards the beginning"


def test_few_rows_stand_for_themselves() -> None:
    numbers, weights = _some_rows(256, 256)
    assert list(numbers) == list(range(256))
    assert (weights == 1).all()
