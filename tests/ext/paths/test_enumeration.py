"""Theorem 2.1 of Dong et al.: every path by itself, from a network written out by hand, against the recursion."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rankscope.errors import InputError
from rankscope.ext.paths.census import census
from rankscope.ext.paths.lengths import length_sums
from rankscope.ext.paths.marginals import Pick, head_marginals, through
from rankscope.ext.paths.single import follow
from tests.ext.paths.conftest import Small
from tests.reference.paths import every_path, write_out_gpt2

LAYERS, HEADS = 3, 2


def close(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).norm() / expected.norm()) < 1e-12


@pytest.fixture(scope="module")
def paths(small: Small) -> list[tuple[int, tuple[int | None, ...], Tensor]]:
    with torch.no_grad():
        return list(every_path(write_out_gpt2(small.model, small.ids)))


def enumerated(paths, keep) -> Tensor:
    """Sums by length over the paths that ``keep`` takes; it sees one choice per layer, absent ones included."""
    sums = torch.zeros((LAYERS + 1, *paths[0][2].shape), dtype=torch.float64)
    for start, choice, arrived in paths:
        if keep({layer: head for layer, head in enumerate(choice, start) if head is not None}):
            sums[len([head for head in choice if head is not None])] += arrived
    return sums


def test_every_length(small: Small, paths) -> None:
    found = length_sums(small.network)
    expected = enumerated(paths, lambda used: True)
    expected[0] += small.model.ln_f.bias.detach()
    for k in range(LAYERS + 1):
        close(found.by_length[k], expected[k])
    assert found.error(small.network.out) < 1e-14


def test_the_network_written_out_is_the_model(small: Small) -> None:
    with torch.no_grad():
        close(write_out_gpt2(small.model, small.ids).out, small.model(small.ids)[0])


@pytest.mark.parametrize("pick", [Pick(layer, head) for layer in range(LAYERS) for head in (0, 1, None)], ids=str)
def test_through_and_without_a_head_or_layer(small: Small, paths, pick: Pick) -> None:
    def uses(used):
        return pick.layer in used and pick.head in (None, used[pick.layer])

    expected = enumerated(paths, uses)
    found = through(small.network, pick)
    close(found, expected)
    rest = enumerated(paths, lambda used: not uses(used))
    rest[0] += small.model.ln_f.bias.detach()
    close(length_sums(small.network).by_length - found, rest)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(range(LAYERS), 2)))
@pytest.mark.parametrize("heads", list(itertools.product(range(HEADS), repeat=2)))
def test_pairs_of_heads(small: Small, paths, first: int, second: int, heads: tuple[int, int]) -> None:
    expected = enumerated(paths, lambda used: used.get(first) == heads[0] and used.get(second) == heads[1])
    close(through(small.network, Pick(first, heads[0]), Pick(second, heads[1])), expected)


def test_all_heads_at_once(small: Small) -> None:
    for layer, found in head_marginals(small.network):
        for head in range(HEADS):
            close(found[head], through(small.network, Pick(layer, head)).sum(0))


def test_single_paths_from_the_embedding(small: Small, paths) -> None:
    mine = [(choice, arrived) for start, choice, arrived in paths[: (1 + HEADS) ** LAYERS] if start == 0]
    assert len(mine) == census([HEADS] * LAYERS).total
    for found, (_, arrived) in zip(follow(small.network, [choice for choice, _ in mine]), mine, strict=True):
        close(found, arrived)


def test_origins_are_kept_apart(small: Small, paths) -> None:
    found = length_sums(small.network, by_origin=True)
    embedding = torch.zeros_like(found.by_length)
    for start, choice, arrived in paths[: (1 + HEADS) ** LAYERS]:
        assert start == 0
        embedding[len([head for head in choice if head is not None])] += arrived
    close(found.sums["embedding"], embedding)
    assert set(found.sums) == {"embedding", "mlp", "bias"}
    close(found.by_length, length_sums(small.network).by_length)


def test_a_head_that_is_not_there(small: Small) -> None:
    with pytest.raises(InputError, match="heads 0 to 1"):
        through(small.network, Pick(0, 7))
    with pytest.raises(InputError, match="one head of a layer"):
        through(small.network, Pick(0, 0), Pick(0, 1))
