"""Programs that are odd and fine: each trains, and ``doctor`` finds no fault in it.

First look (commit 69e7f2d9, 2026-11-19): 2 of 96 were accused, ``rotary_positions`` (values rotated by position) and
``an_input_that_is_ignored`` (types of tokens that are all alike).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import rankscope as rs
from tests.healthy import models, trainings
from tests.healthy.parts import Case

PROGRAMS = [*models.PROGRAMS, *trainings.PROGRAMS]


def case_of(make: Callable[[], Case]) -> Case:
    torch.manual_seed(0)
    return make()


@pytest.mark.slow
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_a_healthy_program_trains(make: Callable[[], Case]) -> None:
    before, after = case_of(make).train()
    assert after < 0.7 * before


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_a_healthy_program_is_not_accused(make: Callable[[], Case]) -> None:
    case = case_of(make)
    report = rs.doctor(
        case.model, case.inputs, labels=case.labels, loss=case.loss, optimizer=lambda model: case.optimizer(case.held())
    )
    assert [one.sentence for one in report.findings if one.kind == "fault"] == []
