"""The confusion matrix in small form: each kind of stack a few times."""

from __future__ import annotations

import pytest
import torch

from rankscope.verdicts.states import State
from tests.verdicts.corpus import KINDS, Draw, verdicts_of


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_stack_is_named(name: str) -> None:
    found = verdicts_of(KINDS[name], seeds=range(2))
    assert [verdict.code for verdict in found] == [KINDS[name].label] * 2, found[0].sentence


def test_labels_are_states() -> None:
    codes = {state.code for state in State}
    assert {kind.label for kind in KINDS.values()} <= codes
    assert codes - {kind.label for kind in KINDS.values()} == {"unknown"}


def test_a_stack_is_drawn_from_its_seed() -> None:
    first, again = (KINDS["mostly_equal"].build(Draw(5)).layers for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
