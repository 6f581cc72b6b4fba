"""Laws that hold for every mask, and what a mask answers when it cannot."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from rankscope.errors import InputError
from rankscope.masks import Mask, parse_mask
from rankscope.masks._edges import Progressions
from tests.masks.strategies import lengths, masks


def dense(mask: Mask, n: int) -> torch.Tensor:
    return mask.dense(n, allow_empty=True)


@given(masks, masks, lengths)
def test_de_morgan(a: Mask, b: Mask, n: int) -> None:
    assert torch.equal(dense(~(a | b), n), dense(~a & ~b, n))
    assert torch.equal(dense(~(a & b), n), dense(~a | ~b, n))


@given(masks, masks, masks, lengths)
def test_lattice_laws(a: Mask, b: Mask, c: Mask, n: int) -> None:
    assert torch.equal(dense(a | a, n), dense(a, n))
    assert torch.equal(dense(a & a, n), dense(a, n))
    assert torch.equal(dense(a | b, n), dense(a, n) | dense(b, n))
    assert torch.equal(dense(a & b, n), dense(a, n) & dense(b, n))
    assert torch.equal(dense(~a, n), ~dense(a, n))
    assert torch.equal(dense(a & (b | c), n), dense((a & b) | (a & c), n))
    assert (a | b) | c == a | (b | c)
    assert (a & b) & c == a & (b & c)
    assert ~~a == a


@given(masks, lengths)
def test_sparse_is_dense(mask: Mask, n: int) -> None:
    sparse = mask.sparse(n, allow_empty=True)
    assert sparse.dtype == np.bool_
    assert sparse.has_canonical_format
    assert sparse.toarray().tolist() == dense(mask, n).tolist()
    assert mask.most_edges(n) >= sparse.nnz


@given(masks, lengths)
def test_facts_of_a_composition_are_true(mask: Mask, n: int) -> None:
    seen = dense(mask, n)
    assert not mask.is_causal or not seen.triu(1).any()
    assert not mask.self_loops or seen.diagonal().all()


@given(masks)
def test_text_is_read_back(mask: Mask) -> None:
    assert parse_mask(str(mask)) == mask
    assert hash(parse_mask(str(mask))) == hash(mask)
    assert eval(repr(mask), {"parse_mask": parse_mask}) == mask
    assert pickle.loads(pickle.dumps(mask)) == copy.deepcopy(mask) == mask


@given(masks, lengths, lengths)
def test_queries_are_aligned_at_the_end(mask: Mask, n: int, m: int) -> None:
    query, key = min(n, m), max(n, m)
    assert torch.equal(mask.dense(query, key, allow_empty=True), dense(mask, key)[-query:])


def test_an_empty_row_is_named() -> None:
    with pytest.raises(InputError, match=r"'~window\(1\)' query 1 \(position 1\) sees none of the 3 keys.*window\(0\)"):
        parse_mask("~window(1)").dense(3)
    with pytest.raises(InputError, match="query 1 "):
        parse_mask("~window(1)").sparse(3)
    with pytest.raises(InputError, match=r"query 0 \(position -2\) sees none of the 3 keys"):
        parse_mask("causal").dense(5, 3)
    assert parse_mask("~window(1)").dense(3, allow_empty=True).sum() == 2


@pytest.mark.parametrize("lengths", [(0, None), (-1, 3), (2, 0), (True, None), (2.0, None)])
def test_lengths_are_positive_numbers(lengths: tuple[Any, Any]) -> None:
    with pytest.raises(InputError, match="number of tokens"):
        parse_mask("causal").dense(*lengths)


def test_only_masks_compose() -> None:
    with pytest.raises(TypeError):
        parse_mask("causal") | "window(1)"  # type: ignore[operator]


def test_a_mask_is_frozen() -> None:
    with pytest.raises(AttributeError):
        parse_mask("window(1)").name = "causal"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("expression", "edges"),
    [
        ("window(3)", 7 * 65536 - 12),
        ("causal & window(3)", 4 * 65536 - 6),
        ("window(3) & ~causal", 3 * 65536 - 6),
        ("causal_window(3) | sink(1)", 5 * 65536 - 10),
        ("(causal | sink(2)) & window(1)", 2 * 65536),
        ("window(2) & ~window(0)", 4 * 65536 - 6),
    ],
)
def test_long_sequences_stay_sparse(expression: str, edges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("the square matrix was looked at")

    monkeypatch.setattr(Mask, "_scan", refused)
    begin = time.process_time()
    assert parse_mask(expression).sparse(65536, allow_empty=True).nnz == edges
    assert time.process_time() - begin < 2


def test_bigbird_at_65536() -> None:
    sparse = parse_mask("window(3) | random_sparse(3) | global_tokens(2)").sparse(65536)
    seen = sparse.astype(int).sum(axis=1)
    assert (seen[:2] == 65536).all()
    assert seen[2:].max() <= 7 + 3 + 2


@pytest.mark.parametrize(
    "expression", ["causal", "complete", "~window(1)", "causal | window(3)", "~causal & ~window(2)"]
)
def test_what_does_not_fit_is_refused_at_once(expression: str) -> None:
    begin = time.process_time()
    with pytest.raises(InputError, match="fewer tokens"):
        parse_mask(expression).sparse(65536)
    assert time.process_time() - begin < 2


def test_a_dense_mask_that_does_not_fit_is_refused() -> None:
    words = r"131,072 queries and 131,072 keys has 17,179,869,184 cells, more than the 4,294,967,296 .*Use sparse\(\)"
    with pytest.raises(InputError, match=words):
        parse_mask("causal").dense(1 << 17)


def test_limits_are_the_last_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.masks._mask.DENSE_LIMIT", 12)
    monkeypatch.setattr("rankscope.masks._mask.SCAN_LIMIT", 9)
    monkeypatch.setattr("rankscope.masks._edges.EDGE_LIMIT", 4)
    assert parse_mask("causal").dense(3, 4).shape == (3, 4)
    with pytest.raises(InputError, match="has 15 cells, more than the 12 of"):
        parse_mask("causal").dense(3, 5)
    odd = parse_mask("~causal")
    assert odd.sparse(3, allow_empty=True).nnz == 3
    with pytest.raises(InputError, match="every pair of 4 tokens is refused above 9 pairs"):
        odd.sparse(4, allow_empty=True)
    assert parse_mask("window(0)").sparse(4).nnz == 4
    with pytest.raises(InputError, match="up to 5 pairs"):
        parse_mask("window(0)").sparse(5)


@pytest.mark.parametrize("cells", [1, 5, 7, 20])
@pytest.mark.parametrize(("query", "key"), [(7, 7), (3, 7), (7, 3), (1, 1)])
def test_rows_are_looked_at_some_at_a_time(cells: int, query: int, key: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = parse_mask("~(causal & window(2))")
    own, keys = torch.arange(query)[:, None] + key - query, torch.arange(key)
    want = ~((keys <= own) & ((keys - own).abs() <= 2))
    monkeypatch.setattr("rankscope.masks._mask._CELLS_AT_ONCE", cells)
    assert torch.equal(mask.dense(query, key, allow_empty=True), want)
    if query == key:
        assert mask.sparse(query, allow_empty=True).toarray().tolist() == want.tolist()


def test_wide_masks_are_counted_and_cut_into_stretches() -> None:
    """What prefix sums need: a causal mask of a million tokens without its edges."""
    edges = parse_mask("causal").edges(1_000_000)  # type: ignore[attr-defined]
    assert isinstance(edges, Progressions)
    assert edges.count == 1_000_000 * 1_000_001 // 2
