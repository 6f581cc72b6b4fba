"""Sampled paths against all of them: the law of the draws, unbiased sums, intervals, and a certified search."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from rankscope.errors import InputError
from rankscope.ext.paths.census import census
from rankscope.ext.paths.lengths import length_sums
from rankscope.ext.paths.single import chain_norm, follow, head_norms, median_interval, sample_paths, top_paths
from tests.ext.paths.conftest import Small

LAYERS, HEADS = 3, 2
ALL = list(itertools.product((None, 0, 1), repeat=LAYERS))


def length_of(path) -> int:
    return sum(head is not None for head in path)


@pytest.mark.parametrize("length", range(LAYERS + 1))
def test_uniform_draws_have_the_weight_of_their_number(small: Small, length: int) -> None:
    sample = sample_paths(small.network, length, 20, seed=1)
    assert {length_of(path) for path in sample.paths} == {length}
    expected = math.log(census([HEADS] * LAYERS).counts[length])
    assert torch.allclose(sample.log_weights, torch.full((20,), expected, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(sample.streams, follow(small.network, sample.paths))


@pytest.mark.parametrize("weighting", ["uniform", "norm"])
def test_weighted_draws_estimate_the_sum(small: Small, weighting) -> None:
    """400 draws, fixed beforehand: the mean of weighted shares lies within five standard errors of the true share."""
    exact = length_sums(small.network, by_origin=True).sums["embedding"][2]
    sample = sample_paths(small.network, 2, 400, weighting=weighting, seed=0)
    out = small.network.out
    shares = (sample.streams * out).sum(dim=(1, 2, 3)) * sample.log_weights.exp()
    error = float(shares.std()) / math.sqrt(400)
    assert abs(float(shares.mean()) - float((exact * out).sum())) < 5 * error


def test_probabilities_by_norm_add_up_to_one(small: Small) -> None:
    """Every path of the length, found by many draws, with its own probability."""
    sample = sample_paths(small.network, 2, 600, weighting="norm", seed=0)
    probability = {p: math.exp(-w) for p, w in zip(sample.paths, sample.log_weights.tolist(), strict=True)}
    assert len(probability) == census([HEADS] * LAYERS).counts[2]
    assert sum(probability.values()) == pytest.approx(1.0, rel=1e-12)


def test_median_interval_covers() -> None:
    """1000 samples of 40 skewed values: a 95% interval misses in at most 5% plus five standard errors."""
    generator = torch.Generator().manual_seed(0)
    true = math.log(2)
    found = [median_interval(torch.empty(40).exponential_(generator=generator)) for _ in range(1000)]
    missed = sum(not entry.low <= true <= entry.high for entry in found)
    assert missed < 50 + 5 * math.sqrt(1000 * 0.05 * 0.95)
    assert all(math.isinf(bound) for bound in (median_interval(torch.ones(3)).low, median_interval(torch.ones(3)).high))


def test_median_intervals_of_the_sign_test() -> None:
    """Ranks as tables of the sign test give them: between these order statistics with at least this confidence."""
    for number, confidence, rank in ((6, 0.95, 1), (10, 0.95, 2), (20, 0.95, 6), (20, 0.99, 4), (9, 0.5, 3)):
        found = median_interval(torch.arange(number, 0, -1), confidence)
        assert (found.low, found.high) == (rank, number + 1 - rank)
        assert found.estimate == (number + 1) / 2
        assert found.confidence == confidence
    assert median_interval(torch.arange(5.0)).high == math.inf, "31/32 of each side is all that five values can give"
    nothing = median_interval(torch.empty(0))
    assert (nothing.low, nothing.high) == (-math.inf, math.inf)
    assert math.isnan(nothing.estimate)


def test_gains_of_heads_are_those_of_their_matrices(small: Small) -> None:
    for step in small.network.steps:
        if step.heads is None:
            continue
        around = chain_norm(step.before) * chain_norm(step.after)
        for head, bound in enumerate(head_norms(step)):
            part = slice(4 * head, 4 * head + 4)
            matrix = step.heads.values[:, part] @ step.heads.output[part]
            mixing = max(float(torch.linalg.svdvals(probs[head])[0]) for probs in step.heads.probs)
            expected = around * mixing * float(torch.linalg.svdvals(matrix)[0])
            assert expected <= bound <= expected * (1 + 1e-8)


@pytest.mark.parametrize("length", [None, 2])
def test_top_paths_are_the_top(small: Small, length: int | None) -> None:
    every = [path for path in ALL if length is None or length_of(path) == length]
    norms = torch.linalg.vector_norm(follow(small.network, every).flatten(1), dim=1)
    order = norms.argsort(descending=True)[:3].tolist()
    found = top_paths(small.network, 3, length=length, beam=1000)
    assert found.certified
    assert found.pruned_bound == 0
    assert found.paths == tuple(every[number] for number in order)
    assert found.norms == pytest.approx([float(norms[number]) for number in order], rel=1e-12)


@pytest.mark.parametrize("beam", [1, 2, 4])
def test_the_bound_holds_for_every_dropped_path(small: Small, beam: int) -> None:
    found = top_paths(small.network, 1, beam=beam)
    norms = torch.linalg.vector_norm(follow(small.network, ALL).flatten(1), dim=1)
    for path, norm in zip(ALL, norms.tolist(), strict=True):
        assert norm <= max(found.pruned_bound, found.norms[0]) or path in found.paths
    if found.certified:
        assert found.norms[0] == pytest.approx(float(norms.max()), rel=1e-12)


def test_no_such_length(small: Small) -> None:
    with pytest.raises(InputError, match="lengths go from 0 to 3"):
        sample_paths(small.network, 4, 1)
    with pytest.raises(InputError, match="3 entries"):
        follow(small.network, [(None, 0)])
