"""Programs that are odd and fine: each trains, and ``doctor`` finds no fault in it.

To add a program, write a function of about eight lines that takes no arguments and returns a
:class:`tests.healthy.parts.Case`. It is collected by its annotation, and its name says what is odd. Put it in the
file that fits: ``models`` (one change to a transformer), ``trainings`` (what is frozen, what a loss compares),
``networks`` (other architectures) or ``objectives`` (other objectives, number formats, optimizers). People must do it
on purpose, no program may have it already, and its loss must fall by 30% in a few seconds. Write it without looking at
how ``doctor`` works. If ``doctor`` accuses the program, add it to ``EXPECTED`` with the claim. The test fails when the
claim is no longer made: remove the entry then.

First looks, each at programs that ``doctor`` had not seen:

- commit 69e7f2d9, 2026-11-19: 2 of 96 accused, ``rotary_positions`` (values rotated by position) and
  ``an_input_that_is_ignored`` (types of tokens that are all alike).
- commit 1139a4c1, 2026-11-19: 5 of 115 accused, ``outputs_that_read_latents``, ``heads_that_talk``,
  ``packed_texts``, ``a_list_that_is_the_batch`` and ``features_taken_without_gradient``. For two more, the loss was
  called with labels of another shape than the outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import rankscope as rs
from tests.healthy import models, networks, objectives, trainings
from tests.healthy.parts import Case

PROGRAMS = [*models.PROGRAMS, *trainings.PROGRAMS, *networks.PROGRAMS, *objectives.PROGRAMS]

EXPECTED: dict[str, str] = {}


def case_of(make: Callable[[], Case]) -> Case:
    torch.manual_seed(0)
    return make()


def marked(make: Callable[[], Case]) -> object:
    """A program, expected to fail if it is in ``EXPECTED``."""
    reason = EXPECTED.get(make.__name__)
    return pytest.param(make, id=make.__name__, marks=[pytest.mark.xfail(reason=reason, strict=True)] if reason else [])


@pytest.mark.sampled(12)
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_a_healthy_program_trains(make: Callable[[], Case]) -> None:
    before, after = case_of(make).train()
    assert after < before - 0.3 * abs(before)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", [marked(make) for make in PROGRAMS])
def test_a_healthy_program_is_not_accused(make: Callable[[], Case]) -> None:
    case = case_of(make)
    report = rs.doctor(case.model, case.inputs, labels=case.labels, loss=case.loss, optimizer=case.made)
    assert [one.sentence for one in report.findings if one.kind == "fault"] == []
