"""Lines to beat, on data small enough to count by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from rankscope.ext.papers.training.baselines import ALONE, CONSTANT, POSITION, TWINS, guesses
from rankscope.ext.papers.training.tasks import IGNORED, Examples, hull_task, sort_task


def test_counted_by_hand() -> None:
    ids = torch.tensor([[1, 1, 2], [1, 2, 0]])
    labels = torch.tensor([[0, 1, 1], [1, 0, IGNORED]])
    found = guesses(Examples({"input_ids": ids}, labels), positions=False)
    # labels 0 1 1 1 0; id 1 has answers 0 1 1, id 2 has 1 0; twins: only sentence 0 has id 1 twice, with 0 and 1.
    assert found == {CONSTANT: 3 / 5, ALONE: 3 / 5, TWINS: 4 / 5}


def test_positions_are_known_where_the_model_knows_them() -> None:
    found = guesses(sort_task(0).held, positions=True)
    assert set(found) == {CONSTANT, POSITION, ALONE}
    assert found[CONSTANT] < found[POSITION] < found[ALONE]


def test_sorted_uniform_symbols_have_the_order_statistics_law() -> None:
    """At position k the sorted symbol is below s with the binomial chance of more than k draws below s."""
    from scipy.stats import binom

    length, symbols = 8, 10
    best = []
    for place in range(length):
        below = [binom.sf(place, length, symbol / symbols) for symbol in range(symbols + 1)]
        best.append(max(high - low for low, high in itertools.pairwise(below)))
    found = guesses(sort_task(0, train=1, held=20_000).held, positions=True)
    assert found[POSITION] == pytest.approx(sum(best) / length, abs=0.005)


def test_points_have_no_table_of_words() -> None:
    assert set(guesses(hull_task(0, train=1, held=20).held, positions=False)) == {CONSTANT}
