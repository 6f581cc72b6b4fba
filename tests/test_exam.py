"""The exam's programs can be built: each has a loss and can be trained by its optimizer."""

from __future__ import annotations

import pytest
import torch
from benchmarks.exam import CASES, Case


@pytest.mark.parametrize("faulty", [True, False], ids=["faulty", "healthy"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.make.__name__)
def test_a_program_of_the_exam_is_built(case: Case, faulty: bool) -> None:
    torch.manual_seed(0)
    program = case.make(faulty)
    loss = program.loss_now()
    assert loss.ndim == 0
    assert faulty or loss.isfinite()
    loss.backward()
    program.optimizer(program.model).step()
    assert case.wrong


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.make.__name__)
def test_a_healthy_twin_trains(case: Case) -> None:
    torch.manual_seed(0)
    program = case.make(False)
    before, optimizer = program.loss_now().item(), torch.optim.AdamW(program.model.parameters(), 3e-3)
    for _ in range(50):
        optimizer.zero_grad()
        program.loss_now().backward()
        optimizer.step()
    assert program.loss_now().item() < 0.7 * before
