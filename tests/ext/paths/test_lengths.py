"""Sums by length: which lengths there are, and how far off a sum is."""

from __future__ import annotations

import pytest

from rankscope.errors import InputError
from rankscope.ext.paths.lengths import LengthSums, lengths_of_interest
from tests.ext.paths.conftest import Small


def test_which_lengths_there_are() -> None:
    assert lengths_of_interest(3, None) == [0, 1, 2, 3]
    assert lengths_of_interest(3, [3, 0, 3]) == [0, 3]
    with pytest.raises(InputError, match=r"lengths=\[-1, 4\]: paths of this model have lengths 0 to 3"):
        lengths_of_interest(3, [4, 1, -1])


def test_a_depth_that_is_too_small_is_refused(small: Small) -> None:
    sums = LengthSums(2)
    sums.begin(small.network.entry)
    *earlier, last = [step for step in small.network.steps if step.heads is not None]
    for step in earlier:
        sums.step(step)
    with pytest.raises(InputError, match="More than 2 attention layers"):
        sums.step(last)
