"""The exam's programs can be built: each has a loss and can be trained by its optimizer."""

from __future__ import annotations

import pytest
import torch
from benchmarks.exam import CASES, Case, runs


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


@pytest.mark.parametrize("faulty", [True, False], ids=["faulty", "healthy"])
@pytest.mark.parametrize("training", runs.RUNS, ids=lambda training: training.run.__name__)
def test_a_training_of_the_exam_runs(training: runs.TrainingRun, faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "STEPS", 4)
    monkeypatch.setattr(runs, "ONSET", 2)
    torch.manual_seed(0)
    watched: list[torch.nn.Module] = []
    losses = training.run(faulty, lambda model, optimizer: watched.append(model))
    assert len(losses) == 4
    assert len(watched) == 1
    assert faulty or all(loss == loss for loss in losses)
    assert training.wrong


@pytest.mark.slow
@pytest.mark.parametrize("training", runs.RUNS, ids=lambda training: training.run.__name__)
def test_a_healthy_training_of_the_exam_learns(training: runs.TrainingRun) -> None:
    torch.manual_seed(0)
    losses = training.run(False, lambda model, optimizer: None)
    assert sum(losses[-20:]) / 20 < 0.85 * losses[0]
