"""How many sequences of some batches differ."""

from __future__ import annotations

import pytest
import torch

from rankscope.models.inputs import Batch, distinct_in

ROWS = torch.tensor([[1, 2, 3], [1, 2, 4], [1, 2, 3], [5, 6, 7]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("axis", [0, 1])
def test_equal_rows_count_once(dtype: torch.dtype, axis: int) -> None:
    rows = (ROWS > 3).to(dtype) if dtype is torch.bool else ROWS.to(dtype)
    expected = len({tuple(row) for row in rows.tolist()})
    first = Batch({"x": rows.movedim(0, axis)}, None, 0, 4, axis=axis)
    assert distinct_in([first]) == expected
    assert distinct_in([first, Batch({"x": rows[1:3].movedim(0, axis)}, None, 4, 2, axis=axis)]) == expected


def test_a_second_tensor_tells_rows_apart() -> None:
    deep = torch.zeros(4, 2, 5)
    deep[2, 1, 4] = 1.0
    assert distinct_in([Batch({"x": ROWS, "y": torch.zeros(4, 2, 5)}, None, 0, 4)]) == 3
    assert distinct_in([Batch({"x": ROWS, "y": deep}, None, 0, 4)]) == 4
    assert distinct_in([Batch({"x": ROWS, "label": torch.arange(4)}, None, 0, 4)]) == 4
    assert distinct_in([Batch({"x": ROWS, "none": torch.zeros(4, 0)}, None, 0, 4)]) == 3


def test_padding_does_not_tell_rows_apart() -> None:
    keep = torch.tensor([[True, True, False], [True, True, False], [True, True, True], [True, True, True]])
    assert distinct_in([Batch({"x": ROWS}, keep, 0, 4)]) == 3
    assert distinct_in([Batch({"x": ROWS}, None, 0, 4)]) == 3
    assert distinct_in([Batch({"x": ROWS[:2]}, keep[:2], 0, 2)]) == 1


def test_inputs_that_are_no_tensors_all_count() -> None:
    assert distinct_in([Batch({"x": "text"}, None, 0, 3)]) == 3
