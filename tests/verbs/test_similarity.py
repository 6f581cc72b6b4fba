"""Cosines kept for the report: right, few, and whole when read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rankscope import Inputs, load_run, measure
from rankscope.errors import InputError
from rankscope.runs.similarity import MOST_TOKENS, packed, shown_positions, similarities_in
from rankscope.verbs.measure.similarity import cosines


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_cosines_against_a_plain_loop(scale: float) -> None:
    x = torch.randn(5, 7, dtype=torch.float64) * scale
    expected = [[float(a @ b / a.norm() / b.norm()) for b in x / scale] for a in x / scale]
    assert cosines(x) == pytest.approx(np.array(expected) / np.array(expected)[0, 0], abs=1e-12)


def test_a_zero_token_has_no_direction() -> None:
    found = cosines(torch.tensor([[0.0, 0.0], [1.0, 2.0]]))
    assert np.isnan(found[0]).all()
    assert packed(found) == [None, None, 1000]


def test_at_most_64_tokens_both_ends_among_them() -> None:
    assert shown_positions(3) == [0, 1, 2]
    many = shown_positions(1000)
    assert (len(many), many[0], many[-1]) == (MOST_TOKENS, 0, 999)
    assert shown_positions(0) == []


def test_measure_keeps_every_block(tmp_path: Path) -> None:
    run = measure("init:tiny-bert", Inputs(sequences=3, tokens=80, batch=1), similarity=True)
    run.save(tmp_path)
    found = similarities_in(load_run(tmp_path).extra)[""]
    assert found.blocks == (0, 1, 2)
    assert len(found.positions) == MOST_TOKENS
    mean = run.select(metric="mean_cosine", site="block.out", layer=2)["value"].to_pylist()[0]
    pairs = found.matrices[2][~np.eye(MOST_TOKENS, dtype=bool)]
    assert np.nanmean(pairs) == pytest.approx(mean, abs=0.1), "64 of 80 tokens stand for all"
    assert np.diagonal(found.matrices[0]) == pytest.approx(1.0)


def test_all_pairs_give_the_mean_cosine() -> None:
    run = measure("init:tiny-bert", Inputs(sequences=1, tokens=24), similarity=True)
    found = similarities_in(run.extra)[""]
    mean = run.select(metric="mean_cosine", site="block.out", layer=1)["value"].to_pylist()[0]
    assert found.matrices[1][~np.eye(24, dtype=bool)].mean() == pytest.approx(mean, abs=5e-4)


def test_by_default_nothing_is_kept_and_the_site_is_needed() -> None:
    assert "similarity" not in measure("init:tiny-bert", Inputs(sequences=1, tokens=8)).extra
    with pytest.raises(InputError, match=r"block\.out"):
        measure("init:tiny-bert", Inputs(sequences=1, tokens=8), sites=["block.in"], similarity=True)


@pytest.mark.parametrize(
    "stored",
    [
        {"sequence": 0, "stacks": {"": {"tokens": 2, "positions": [0, 1], "blocks": [0], "cosines": [[1000]]}}},
        {"sequence": 0, "stacks": {"": {"tokens": 2, "positions": [0, 1], "blocks": [0, 1], "cosines": [[1, 2, 3]]}}},
        {"sequence": 0, "stacks": {"": {"tokens": 99, "positions": list(range(99)), "blocks": [0], "cosines": [[]]}}},
        {"stacks": []},
        "words",
    ],
)
def test_a_block_that_is_not_whole_is_refused(stored: object) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        similarities_in({"similarity": stored})
