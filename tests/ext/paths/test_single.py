"""Sampled paths against all of them: the law of the draws, and unbiased sums."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from rankscope.errors import InputError
from rankscope.ext.paths.census import census
from rankscope.ext.paths.lengths import length_sums
from rankscope.ext.paths.single import follow, sample_paths
from tests.ext.paths.conftest import Small

LAYERS, HEADS = 3, 2


def length_of(path) -> int:
    return sum(head is not None for head in path)


@pytest.mark.parametrize("length", range(LAYERS + 1))
def test_draws_have_the_length_that_was_asked(small: Small, length: int) -> None:
    sample = sample_paths(small.network, length, 20, seed=1)
    assert {length_of(path) for path in sample.paths} == {length}
    assert torch.equal(sample.streams, follow(small.network, sample.paths))


def test_each_path_is_drawn_equally_often(small: Small) -> None:
    """1200 draws of 12 paths, fixed beforehand: the largest count lies within five standard deviations of 100."""
    counts = Counter(sample_paths(small.network, 2, 1200, seed=0).paths)
    assert len(counts) == census([HEADS] * LAYERS).counts[2] == 12
    assert max(abs(count - 100) for count in counts.values()) < 5 * math.sqrt(1200 * (1 / 12) * (11 / 12))


def test_draws_estimate_the_sum(small: Small) -> None:
    """400 draws, fixed beforehand: the mean of weighted shares lies within five standard errors of the true share."""
    exact = length_sums(small.network, by_origin=True).sums["embedding"][2]
    sample = sample_paths(small.network, 2, 400, seed=0)
    out = small.network.out
    shares = (sample.streams * out).sum(dim=(1, 2, 3)) * census([HEADS] * LAYERS).counts[2]
    error = float(shares.std()) / math.sqrt(400)
    assert abs(float(shares.mean()) - float((exact * out).sum())) < 5 * error


def test_no_such_length(small: Small) -> None:
    with pytest.raises(InputError, match="lengths go from 0 to 3"):
        sample_paths(small.network, 4, 1)
    with pytest.raises(InputError, match="3 entries"):
        follow(small.network, [(None, 0)])
