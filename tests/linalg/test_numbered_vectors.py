"""Many vectors in constant memory: the values of all at once, whatever the batches and the processes."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from rankscope.linalg.numbered_vectors import NumberedVectors
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS
from rankscope.verbs.between_inputs import FROM_MOMENTS

COUNT, DIM = 5000, 12


def vectors(spread: float = 1.0, count: int = COUNT) -> torch.Tensor:
    """Vectors with a common one and a spectrum that decays; nearly equal for a small spread."""
    generator = torch.Generator().manual_seed(3)
    common = 2 * torch.randn(1, DIM, generator=generator, dtype=torch.float64)
    own = torch.randn(count, DIM, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 1.0, DIM)
    return common + spread * own


def collected(x: torch.Tensor, batch: int, world: int = 1) -> NumberedVectors:
    """What the first of ``world`` processes has after they told each other, which they do twice."""
    ranks = [NumberedVectors(len(x), 1 << 20, x[0]) for _ in range(world)]
    for turn, first in enumerate(range(0, len(x), batch)):
        ranks[turn % world].add(first, x[first : first + batch])
    told = [rank.to_json() for rank in ranks]
    for facts in (*told, *told):
        ranks[0].learn(facts)
    return ranks[0]


@cache
def equivalent_of(spread: float, batch: int) -> torch.Tensor:
    found = collected(vectors(spread), batch).equivalent()
    assert found is not None
    return found


@pytest.mark.parametrize("name", sorted(FROM_MOMENTS))
@pytest.mark.parametrize("spread", [1.0, 1e-4])
@pytest.mark.parametrize("batch", [7, 64])
def test_metrics_of_the_moments_are_those_of_all_vectors(name: str, spread: float, batch: int) -> None:
    x = vectors(spread)
    equivalent = equivalent_of(spread, batch)
    assert len(equivalent) == DIM + 1
    torch.testing.assert_close(METRICS[name].function(equivalent), METRICS[name].function(x), rtol=1e-10, atol=0)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes_give_what_one_gives(world: int) -> None:
    x = vectors(1e-3)
    one, several = collected(x, 32), collected(x, 32, world)
    a, b = one.equivalent(), several.equivalent()
    assert a is not None
    assert b is not None
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert torch.equal(one.sample(), several.sample())
    assert several.is_complete


def test_few_vectors_are_kept_as_they_are() -> None:
    x = vectors(count=300)
    found = collected(x, 7, world=2)
    assert found.is_exact
    assert torch.equal(found.sample(), x)
    assert found.equivalent() is None


def test_memory_does_not_grow_with_their_number() -> None:
    held = [collected(vectors(count=count), 64).bytes_held for count in (5000, 20_000)]
    assert held[0] == held[1]


def test_wide_vectors_are_only_sampled() -> None:
    x = torch.randn(300, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = NumberedVectors(300, 1 << 20)
    found.add(0, x)
    assert not found.is_exact
    assert found.equivalent() is None
    assert len(found.sample()) == 256


def test_a_vector_that_does_not_exist_is_left_out() -> None:
    x = vectors(count=4)
    x[2] = float("nan")
    found = NumberedVectors(4, 1 << 20)
    found.add(0, x, [True, True, False, True])
    assert found.is_complete
    assert torch.equal(found.sample(), x[[0, 1, 3]])


def test_without_a_reference_near_collapse_would_be_lost() -> None:
    """Why the moments are about one of the vectors: about zero, the residual of 1e-9 has no digit left."""
    x = vectors(1e-9)
    naive = (x.mT @ x - len(x) * torch.outer(x.mean(0), x.mean(0))).trace().clamp_min(0).sqrt() / x.norm()
    want = Tokens(x).relative_deviation.item()
    equivalent = collected(x, 32).equivalent()
    assert equivalent is not None
    assert abs(METRICS["relative_residual"].function(equivalent).item() / want - 1) < 1e-6
    assert abs(naive.item() / want - 1) > 0.1
