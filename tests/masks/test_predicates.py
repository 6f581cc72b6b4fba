"""Each mask against its sentence, written as a double loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rankscope.errors import InputError
from rankscope.masks import MASKS, parse_mask
from rankscope.masks.random_sparse import _mixed, drawn_keys

REFERENCES: list[tuple[str, Callable[[int, int], bool]]] = [
    ("complete", lambda q, k: True),
    ("causal", lambda q, k: k in range(q + 1)),
    ("window(0)", lambda q, k: q == k),
    ("window(1)", lambda q, k: k in (q - 1, q, q + 1)),
    ("window(3)", lambda q, k: k in range(q - 3, q + 4)),
    ("causal_window(0)", lambda q, k: q == k),
    ("causal_window(1)", lambda q, k: k in (q - 1, q)),
    ("causal_window(4)", lambda q, k: k in range(q - 4, q + 1)),
    ("sink(2)", lambda q, k: k in (0, 1)),
    ("prefix(0)", lambda q, k: k in range(q + 1)),
    ("prefix(3)", lambda q, k: k in range(q + 1) or (q in (0, 1, 2) and k in (0, 1, 2))),
    ("global_tokens(2)", lambda q, k: q in (0, 1) or k in (0, 1)),
]


def by_hand(sees: Callable[[int, int], bool], query: int, key: int) -> list[list[bool]]:
    return [[sees(key - query + i, j) for j in range(key)] for i in range(query)]


@pytest.mark.parametrize(("expression", "sees"), REFERENCES, ids=[name for name, _ in REFERENCES])
@pytest.mark.parametrize(("query", "key"), [(1, 1), (2, 2), (7, 7), (16, 16), (1, 7), (5, 16), (7, 5), (3, 1)])
def test_against_the_double_loop(expression: str, sees: Callable[[int, int], bool], query: int, key: int) -> None:
    mask = parse_mask(expression)
    got = mask.dense(query, key, allow_empty=True)
    assert got.dtype == torch.bool
    assert got.tolist() == by_hand(sees, query, key)
    if query == key:
        assert mask.sparse(query, allow_empty=True).toarray().tolist() == got.tolist()


@pytest.mark.parametrize("n", [1, 2, 7, 16])
@pytest.mark.parametrize("degree", [0, 1, 3, 15, 40])
def test_random_sparse_sees_itself_and_degree_others(n: int, degree: int) -> None:
    seen = MASKS["random_sparse"](degree, seed=5).dense(n)
    assert seen.diagonal().all()
    assert seen.sum(1).tolist() == [min(degree + 1, n)] * n


def test_random_sparse_rows_do_not_depend_on_the_others() -> None:
    mask = MASKS["random_sparse"](4, seed=1)
    whole = mask.dense(50)
    state = torch.get_rng_state()
    assert torch.equal(mask.dense(3, 50), whole[-3:])
    order = torch.tensor([[40], [3], [17]])
    assert torch.equal(mask.sees(order, torch.arange(50).unsqueeze(0)), whole[order[:, 0]])
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(MASKS["random_sparse"](4, seed=2).dense(50), whole)


def test_random_sparse_draws_evenly() -> None:
    """Each other key in a share 3/8 of 20,000 draws: five standard deviations are .0172."""
    draws = np.concatenate([drawn_keys(np.array([4]), 9, 3, seed) for seed in range(20_000)])
    share = np.bincount(draws.ravel(), minlength=9) / len(draws)
    assert share[4] == 0
    assert np.abs(np.delete(share, 4) - 3 / 8).max() < 5 * (3 / 8 * 5 / 8 / 20_000) ** 0.5
    neighbours = drawn_keys(np.arange(20_000), 20_001, 1, 0)[:, 0] / 20_001
    assert abs(np.corrcoef(neighbours[1:], neighbours[:-1])[0, 1]) < 5 / 20_000**0.5


def test_random_sparse_draws_by_splitmix64() -> None:
    """The first numbers of the published generator from the seed 1234567: a mask is the same for ever."""
    states = np.array([(1234567 + (k + 1) * 0x9E3779B97F4A7C15) % 2**64 for k in range(5)], dtype=np.uint64)
    assert _mixed(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_random_sparse_needs_a_position_for_each_query() -> None:
    with pytest.raises(InputError, match="first stands at -2"):
        MASKS["random_sparse"](1).dense(5, 3)


def test_causal_window_is_causal_and_window() -> None:
    for n in (1, 2, 7, 16):
        for width in (0, 1, 3, 20):
            want = parse_mask(f"causal_window({width})").dense(n)
            assert torch.equal(parse_mask(f"causal & window({width})").dense(n), want)


def test_adjacency_is_the_matrix() -> None:
    matrix = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0]])
    mask = MASKS["adjacency"]("101/010/110")
    assert str(mask) == 'adjacency(source="101/010/110", digest="")'
    assert torch.equal(mask.dense(3), matrix.bool())
    assert torch.equal(mask.dense(2, 3), matrix[1:].bool())
    with pytest.raises(InputError, match=r"has 3 tokens.*over 4 keys"):
        mask.dense(4)
    with pytest.raises(InputError, match="has 3 tokens"):
        mask.sparse(4)


@pytest.mark.parametrize("source", ["10/1", "1", "0/", "/", "11", "1/1"])
def test_only_a_square_is_written_out(source: str) -> None:
    if source == "1":
        assert MASKS["adjacency"](source).dense(1, allow_empty=True).numel() == 1
    else:
        with pytest.raises(InputError, match="square"):
            MASKS["adjacency"](source)


@pytest.mark.parametrize("n", [1, 128])
def test_a_square_of_up_to_128_tokens_is_written_out(n: int) -> None:
    matrix = np.arange(n)[:, None] >= np.arange(n)
    text = "/".join("1" * (i + 1) + "0" * (n - 1 - i) for i in range(n))
    assert MASKS["adjacency"](text).dense(n).sum() == matrix.sum()


def test_a_square_of_more_than_128_tokens_is_not_read_as_written_out() -> None:
    with pytest.raises(InputError, match="is not a square of 0 and 1"):
        MASKS["adjacency"]("/".join(["1" * 129] * 129))
