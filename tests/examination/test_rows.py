"""Every row is found in its bad program and not in its good one, and claims no more than its level allows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rankscope as rs
import rankscope.examination
from rankscope.examination import CAUSES, CauseSpec
from rankscope.examination._examples import Program
from rankscope.examination._outcomes import EXPERIMENTS, Outcome
from rankscope.verbs.doctor.checks import DoctorReport

ROWS = [one for one in CAUSES.values() if one.bad is not None]


def asked(program: Program) -> DoctorReport:
    return rs.doctor(
        program.model, program.inputs, labels=program.labels, loss=program.loss, optimizer=program.optimizer
    )


@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.code)
def test_a_row_tells_its_bad_program_from_its_good_one(spec: CauseSpec) -> None:
    assert spec.bad is not None
    assert spec.good is not None
    torch.manual_seed(0)
    found = next(one for one in asked(spec.bad()).findings if one.code == spec.code)
    assert found.kind == spec.level
    torch.manual_seed(0)
    assert [one.code for one in asked(spec.good()).findings if one.kind == "fault"] == []


def test_what_was_not_read_supports_no_claim() -> None:
    assert not Outcome(True, None).shown
    assert not Outcome(None, False).shown
    assert not Outcome(True, True).shown
    assert Outcome(True, False).shown


def test_every_experiment_is_read() -> None:
    source = "".join(path.read_text() for path in Path(rankscope.examination.__file__).parent.glob("*.py"))
    assert [name for name in EXPERIMENTS if f'"{name}"' not in source] == []
