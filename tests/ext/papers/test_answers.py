"""The lines a trained network is held against."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.ext.papers.training.baselines import (
    one_answer_for_all,
    one_answer_per_position,
    one_answer_per_sequence,
)

LABELS = st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=3)


@given(LABELS)
def test_no_choice_of_one_answer_per_sequence_does_better(rows: list[list[int]]) -> None:
    labels = torch.tensor(rows)
    tried = [
        float((labels == torch.tensor(answers)[:, None]).double().mean())
        for answers in product(range(3), repeat=len(rows))
    ]
    assert one_answer_per_sequence(labels) == pytest.approx(max(tried), rel=1e-12)


def test_labels_below_zero_do_not_count() -> None:
    assert one_answer_per_sequence(torch.tensor([[-100, -100, 4, 4]])) == 1.0


def test_one_answer_for_all_and_for_each_position() -> None:
    learnt = torch.tensor([[0, 1], [0, 1], [0, 0]])
    held = torch.tensor([[0, 1], [1, 1]])
    assert one_answer_for_all(learnt, held) == 0.25
    assert one_answer_per_position(learnt, held) == 0.75
