"""Programs that are odd and fine: each trains, and ``doctor`` finds no fault in it.

How a program is added: write a function that takes nothing and returns a :class:`tests.healthy.parts.Case`, in about
eight lines, in the file whose first line fits: ``models`` (one change to a transformer), ``trainings`` (what is frozen,
what a loss compares), ``networks`` (other architectures) or ``objectives`` (other objectives, numbers, optimizers). It
is collected by its annotation. Its name says what is odd. People must do it on purpose, its loss must fall by 30% in a
few seconds, and it must not be a copy of another one. Write it without looking at how ``doctor`` works. If ``doctor``
accuses it, enter it below with the claim; the entry leaves when the claim is no longer made.

First look (commit 69e7f2d9, 2026-11-19): 2 of 96 were accused, ``rotary_positions`` (values rotated by position) and
``an_input_that_is_ignored`` (types of tokens that are all alike).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import rankscope as rs
from tests.healthy import models, networks, objectives, trainings
from tests.healthy.parts import Case

PROGRAMS = [*models.PROGRAMS, *trainings.PROGRAMS, *networks.PROGRAMS, *objectives.PROGRAMS]

ACCUSED: dict[str, str] = {}


def case_of(make: Callable[[], Case]) -> Case:
    torch.manual_seed(0)
    return make()


def marked(make: Callable[[], Case]) -> object:
    """A program, expected to fail if it is accused today."""
    claim = ACCUSED.get(make.__name__)
    return pytest.param(make, id=make.__name__, marks=[pytest.mark.xfail(reason=claim, strict=True)] if claim else [])


@pytest.mark.slow
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_a_healthy_program_trains(make: Callable[[], Case]) -> None:
    before, after = case_of(make).train()
    assert after < before - 0.3 * abs(before)


@pytest.mark.parametrize("make", [marked(make) for make in PROGRAMS])
def test_a_healthy_program_is_not_accused(make: Callable[[], Case]) -> None:
    case = case_of(make)
    report = rs.doctor(case.model, case.inputs, labels=case.labels, loss=case.loss, optimizer=case.made)
    assert [one.sentence for one in report.findings if one.kind == "fault"] == []
