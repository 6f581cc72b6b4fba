"""Sums by length: which lengths there are, and how far off a sum is."""

from __future__ import annotations

import math

import pytest
import torch

from rankscope.errors import InputError
from rankscope.ext.paths.lengths import LengthSums, lengths_of_interest, relative_error
from tests.ext.paths.conftest import Small


def test_which_lengths_there_are() -> None:
    assert lengths_of_interest(3, None) == [0, 1, 2, 3]
    assert lengths_of_interest(3, [3, 0, 3]) == [0, 3]
    with pytest.raises(InputError, match=r"lengths=\[-1, 4\]: paths of this model have lengths 0 to 3"):
        lengths_of_interest(3, [4, 1, -1])


def test_how_far_a_sum_is_off() -> None:
    out = torch.tensor([[[3.0, 4.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 5.0]]])
    parts = torch.stack((0.5 * out, 0.5 * out))
    assert relative_error(parts, out) == 0.0
    parts[0, 0, 1, 0] += 1.0
    parts[1, 1, 1, 1] += 2.0
    assert relative_error(parts, out) == pytest.approx(0.4)
    assert relative_error(parts, out, torch.tensor([[True, True], [True, False]])) == pytest.approx(0.2)
    assert math.isinf(relative_error(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 2)))


def test_the_frozen_maps_give_the_stream_itself(small: Small) -> None:
    torch.testing.assert_close(small.network.total(), small.network.out, rtol=1e-12, atol=1e-12)


def test_a_depth_that_is_too_small_is_refused(small: Small) -> None:
    sums = LengthSums(2)
    sums.begin(small.network.entry)
    *earlier, last = [step for step in small.network.steps if step.heads is not None]
    for step in earlier:
        sums.step(step)
    with pytest.raises(InputError, match="More than 2 attention layers"):
        sums.step(last)
