"""Sums by length: what they take in memory, which lengths there are, and how far off a sum is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rankscope.errors import InputError
from rankscope.ext.paths.lengths import LengthSums, lengths_of_interest, plan_memory, relative_error
from tests.ext.paths.conftest import Small

SIZES: dict[str, Any] = {"sequences": 1, "tokens": 64, "dim": 32, "depth": 10, "heads": 4, "itemsize": 4}
STREAM, PROBABILITIES = 64 * 32 * 4, 4 * 64 * 64 * 4


def least(**changes: Any) -> int:
    """The smallest budget that is not refused."""
    low, high = 0, 2**40
    while high - low > 1:
        middle = (low + high) // 2
        try:
            plan_memory(middle, **{**SIZES, **changes})
            high = middle
        except InputError:
            low = middle
    return high


def test_what_is_held_grows_as_it_must() -> None:
    one = least()
    assert least(itemsize=8) == 2 * one
    assert least(origins=3) - one == 2 * 11 * STREAM, "every sum once more for each origin"
    assert least(depth=11) - one == STREAM, "one more sum"
    assert one > 12 * STREAM + PROBABILITIES
    assert least(kept=True) - one > 10 * PROBABILITIES + 10 * STREAM, "all blocks stay"
    assert least(kept=True, depth=11) - least(kept=True) > PROBABILITIES + STREAM
    assert least(rerun=True) - one > PROBABILITIES + 4 * STREAM, "a block runs again, with its derivative"


def test_a_budget_is_spent_on_sequences_first_and_then_on_sums_at_once() -> None:
    one = least()
    tight = plan_memory(one, **SIZES)
    assert (tight.sequences, tight.chunk) == (1, 1)
    assert plan_memory(100 * one, **{**SIZES, "sequences": 8}).sequences == 8
    assert plan_memory(100 * one, **SIZES).chunk == 11
    chunks = [plan_memory(one * (1 + step / 10), **SIZES).chunk for step in range(30)]
    assert chunks == sorted(chunks)
    assert len(set(chunks)) > 3
    # Each further 4 streams, the temporaries of one block, carry one more sum at once.
    assert [plan_memory(one + 4 * STREAM * step, **SIZES).chunk for step in range(12)] == [*range(1, 12), 11]
    many = {**SIZES, "sequences": 1000}
    assert plan_memory(3.9 * one, **many).sequences < plan_memory(39 * one, **many).sequences < 40
    free = plan_memory(None, **many)
    assert (free.sequences, free.chunk) == (1000, 11)
    with pytest.raises(InputError, match=f"needs {one / 2**30:.3g} GiB beside the model"):
        plan_memory(one - 1, **SIZES)


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
