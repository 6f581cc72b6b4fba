"""The benchmark of failing runs: what is declared exists, and stored readings give the alarms of the run itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.failing_runs import evaluating, training
from benchmarks.failing_runs.declared import FAULTY, HEALTHY, RUNS, SETS
from benchmarks.failing_runs.nets import SPECIAL, Net, place_in_word

from rankscope.monitor import ALARMS, Gauge, read_record


def test_what_is_declared_exists() -> None:
    assert len(FAULTY) >= 16
    assert len(HEALTHY) >= 16
    assert all(run.fault in training.FAULTS and run.right for run in FAULTY)
    assert {name for run in FAULTY for name in run.right} <= set(ALARMS)
    assert all(run.fault is None and not run.right for run in HEALTHY)
    known = set(ALARMS)
    for runs in SETS.values():
        faulty = [run for run in runs if run.fault is not None]
        assert len(faulty) >= 12
        assert len(runs) - len(faulty) >= 6
        assert all(run.fault in training.FAULTS and set(run.right) <= known for run in faulty)


def test_the_place_of_a_character_in_its_word() -> None:
    space, letter = SPECIAL + 1, SPECIAL + 9
    ids = torch.tensor([[letter, letter, space, letter, letter, letter, space, letter]])
    assert place_in_word(ids).tolist() == [[3, 2, 0, 1, 3, 2, 0, 1]]


def test_a_run_may_take_more_steps_than_its_size_says() -> None:
    declared = replace(RUNS["whether the two halves agree"], longer=3)
    assert training.Training(declared, 0, "tiny").size["steps"] == 3 * training.SIZES["tiny"]["steps"]


def test_stored_readings_give_the_alarms_of_the_run_and_a_stored_run_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(training.SIZES, "tiny", {"width": 8, "depth": 1, "steps": 20, "every": 4})
    declared = replace(RUNS["gradients overflow float16"], sets_in=0, layers=1)
    folder = tmp_path / "tiny" / "overflow" / "0"
    training.run(declared, 0, "tiny", folder, live=True)
    before = (folder / training.DONE).stat().st_mtime_ns
    training.run(declared, 0, "tiny", folder, live=True)
    assert (folder / training.DONE).stat().st_mtime_ns == before
    (run,) = evaluating.stored(tmp_path, "tiny", None)
    live = [(alarm.name, alarm.step) for alarm in read_record(folder).alarms if alarm.state == "raised"]
    assert evaluating.gauge(run) == live
    assert live[0][0] == "not_finite"
    facts = evaluating.facts_of(replace(run, declared=declared))
    assert (facts["right"], facts["cause"]) == (True, "gradients")
    # zero false alarms in 100 readings: 1 - 0.025^(1/100)
    assert evaluating.upper_limit(0, 100) == pytest.approx(1 - 0.025**0.01)


def test_a_model_that_can_no_longer_be_read_is_an_alarm_and_the_run_is_read_on() -> None:
    """Rounded with one scale for the whole batch, sequences act on each other: there is no stream of one sequence."""
    torch.manual_seed(0)
    model = Net(40, 2, 16, "pre", causal=True)
    ids = torch.randint(5, 40, (8, 12))
    with Gauge(model, {"input_ids": ids}, schedule=1, actions=(), strict=True) as gauge:
        for step in range(6):
            if step == 3:
                for block in model.blocks:
                    block.levels = 3
            reading = gauge.step(step, loss=1.0)
            assert reading is not None
            assert reading.alarms == ()
            assert [note.name for note in reading.notes] == (["model_changed"] if step == 3 else [])
            if step == 3:
                (alarm,) = reading.notes
                assert alarm.component == "structure"
                assert "the model can no longer be read as before: The axis of sequences" in alarm.sentence
            assert bool(reading.values("relative_residual")) == (step < 3)
