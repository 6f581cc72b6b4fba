"""What every registered mask promises."""

from __future__ import annotations

import inspect

import pytest
import torch

from rankscope.errors import InputError
from rankscope.masks import MASKS, Mask, MaskSpec, parse_mask

EVERY = list(MASKS)
LENGTHS = range(1, 21)


def example(name: str) -> Mask:
    return parse_mask(MASKS[name].example)


def sizes(name: str) -> list[int]:
    """Lengths at which the example has a meaning: all of them, or the graph's own."""
    return [4] if name == "adjacency" else list(LENGTHS)


def test_the_masks_of_the_documentation_are_there() -> None:
    assert set(EVERY) >= {
        "complete", "causal", "window", "causal_window", "sink", "prefix", "random_sparse", "adjacency",
    }  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_facts_are_complete(name: str) -> None:
    spec = MASKS[name]
    assert isinstance(spec, MaskSpec)
    assert spec.name == name
    assert spec.summary.endswith(".")
    assert "Example:" in (spec.predicate.__doc__ or "")
    declared = [parameter.name for parameter in spec.parameters]
    assert list(inspect.signature(spec.predicate).parameters) == ["query", "key", *declared]
    assert all(parameter.meaning for parameter in spec.parameters)
    assert spec.example.startswith(name)


@pytest.mark.parametrize("name", EVERY)
def test_causal_and_self_loops_are_as_declared(name: str) -> None:
    """True holds at every length; False is witnessed at some length, so that it is not declared out of caution."""
    spec = MASKS[name]
    seen = [example(name).dense(n, allow_empty=True) for n in sizes(name)]
    assert all(not s.triu(1).any() for s in seen) is spec.is_causal
    assert all(bool(s.diagonal().all()) for s in seen) is spec.self_loops


@pytest.mark.parametrize("name", EVERY)
def test_no_row_is_empty(name: str) -> None:
    for n in sizes(name):
        assert example(name).dense(n).any(1).all()


@pytest.mark.parametrize("name", EVERY)
def test_sparse_and_counts_are_dense(name: str) -> None:
    for n in sizes(name):
        mask = example(name)
        seen = mask.dense(n)
        assert mask.sparse(n).toarray().tolist() == seen.tolist()
        assert mask.most_edges(n) >= int(seen.sum())
        everything = MASKS["complete"]().rows(n)
        assert mask.among(everything, n).tolist() == seen.flatten().tolist()


@pytest.mark.parametrize("name", EVERY)
def test_the_last_queries_see_what_they_saw(name: str) -> None:
    for key in sizes(name):
        whole = example(name).dense(key)
        for query in range(1, key + 1):
            assert torch.equal(example(name).dense(query, key), whole[-query:])


@pytest.mark.parametrize("name", [n for n in EVERY if MASKS[n].pointwise])
def test_pointwise_predicates_take_any_pairs(name: str) -> None:
    parameters = dict(example(name).parameters)
    whole = example(name).dense(9)
    query, key = torch.randint(9, (2, 50))
    assert torch.equal(MASKS[name].predicate(query, key, **parameters), whole[query, key])


@pytest.mark.parametrize("name", EVERY)
def test_rows_seen_in_pieces_are_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n = sizes(name)[-1]
    whole = example(name).dense(n)
    monkeypatch.setattr("rankscope.masks._mask._CELLS_AT_ONCE", 3 * n)
    assert torch.equal(example(name).dense(n), whole)
    assert (~example(name)).sparse(n, allow_empty=True).toarray().tolist() == (~whole).tolist()


@pytest.mark.parametrize("name", EVERY)
def test_read_back(name: str) -> None:
    mask = example(name)
    assert parse_mask(str(mask)) == mask
    assert mask != ~mask


@pytest.mark.parametrize("name", EVERY)
def test_nothing_given_is_written_to(name: str) -> None:
    n = sizes(name)[-1]
    query, key = torch.arange(n).unsqueeze(1), torch.arange(n).unsqueeze(0)
    example(name).sees(query, key)
    assert query[:, 0].tolist() == key[0].tolist() == list(range(n))
    first = example(name).dense(n)
    want = first.clone()
    first.logical_not_()
    assert torch.equal(example(name).dense(n), want)


@pytest.mark.parametrize(
    ("name", "parameter"), [(n, p) for n in EVERY for p in MASKS[n].parameters if p.kind is int], ids=str
)
def test_ranges_are_kept(name: str, parameter: object) -> None:
    given = dict(example(name).parameters)
    for value in (parameter.minimum - 1, parameter.maximum + 1, 10**30, True, 1.0, "1", None):  # type: ignore[attr-defined]
        with pytest.raises(InputError, match=parameter.name):  # type: ignore[attr-defined]
            MASKS[name](**(given | {parameter.name: value}))  # type: ignore[attr-defined]
    for value in (parameter.minimum, parameter.maximum):  # type: ignore[attr-defined]
        mask = MASKS[name](**(given | {parameter.name: value}))  # type: ignore[attr-defined]
        assert mask.dense(5).tolist() == mask.sparse(5).toarray().tolist()
