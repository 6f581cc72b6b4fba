"""Many vectors in bounded memory: the same ones, whatever the batches and the processes."""

from __future__ import annotations

import pytest
import torch

from rankscope.linalg.numbered_vectors import ALWAYS_STORED, LARGEST_STORED, NumberedVectors

DIM = 12


def vectors(count: int) -> torch.Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def collected(x: torch.Tensor, batch: int, world: int = 1) -> NumberedVectors:
    """What the first of ``world`` processes has after they told each other, which they do twice."""
    ranks = [NumberedVectors(len(x), 1 << 20) for _ in range(world)]
    for turn, first in enumerate(range(0, len(x), batch)):
        ranks[turn % world].add(first, x[first : first + batch])
    told = [rank.to_json() for rank in ranks]
    for facts in (*told, *told):
        ranks[0].learn(facts)
    return ranks[0]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("batch", [7, 64])
def test_few_vectors_are_all_kept_and_of_many_an_even_sample(batch: int, world: int) -> None:
    few, many = vectors(300), vectors(LARGEST_STORED + 1000)
    found = collected(few, batch, world)
    assert found.is_exact
    assert found.is_complete
    assert torch.equal(found.sample(), few)
    found = collected(many, batch, world)
    assert not found.is_exact
    assert found.is_complete
    places = torch.linspace(0, len(many) - 1, LARGEST_STORED, dtype=torch.float64).round().long()
    assert torch.equal(found.sample(), many[places])


def test_of_wide_vectors_fewer_are_kept() -> None:
    x = torch.randn(300, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = NumberedVectors(300, 1 << 20)
    found.add(0, x)
    assert not found.is_exact
    assert len(found.sample()) == ALWAYS_STORED


def test_a_vector_that_does_not_exist_is_left_out() -> None:
    x = vectors(4)
    x[2] = float("nan")
    found = NumberedVectors(4, 1 << 20)
    found.add(0, x, [True, True, False, True])
    assert found.is_complete
    assert torch.equal(found.sample(), x[[0, 1, 3]])
