"""Watched trainings: the tasks, the surgery they run under, and that watching changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rankscope.ext.papers.measuring.parts import RowRecorder
from rankscope.ext.papers.training.fitting import TrainingPlan, fit
from rankscope.ext.papers.training.tasks import causal_sort_task
from rankscope.ext.papers.training_fights_collapse.arms import FULL, SMALL, TrainedArm
from rankscope.ext.papers.training_fights_collapse.run import COORDINATES, network_for, task_for, train
from rankscope.ext.papers.training_fights_collapse.show import Training, arms_of
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import RowWriter, only
from rankscope.runs.run import Run

SIZE = replace(SMALL, depth=2, steps=6)
PLAN = TrainingPlan(steps=6)


def run_of(*arms: TrainedArm) -> Run:
    writer = RowWriter(coordinates=COORDINATES)
    for arm in arms:
        train(arm, 0, SIZE, PLAN, RowRecorder(writer))
    return Run(kind="x", provenance=Provenance(model="x"), floor={}, verdict="", table=writer.table())


def test_the_causal_task_never_shows_an_answer_before_it_is_due() -> None:
    task = causal_sort_task(1, train=20, held=5)
    ids, labels = task.train.inputs["input_ids"], task.train.labels
    assert (labels[:, :8] == -100).all()
    assert torch.equal(labels[:, 8:], ids[:, :8].sort(dim=1).values)
    assert torch.equal(ids[:, 9:], labels[:, 8:-1])
    assert (ids[:, 8] == 10).all()


@pytest.mark.slow
def test_watching_does_not_change_a_training() -> None:
    for arm in (TrainedArm("encoder", "no skip", 2), TrainedArm("causal", "whole", 2)):
        rows = select_losses(run_of(arm))
        task = task_for(arm, SIZE, 0)
        alone = fit(network_for(arm, SIZE, task, 0), task, PLAN, seed=0, operation=arm.operation)
        assert rows == {step: alone.losses[step] for step in SIZE.steps_read()}


def select_losses(run: Run) -> dict[int, float]:
    rows = only(run.table, metric="loss")
    return dict(zip(rows["step"].to_pylist(), rows["value"].to_pylist(), strict=True))


@pytest.mark.slow
def test_attention_alone_has_order_three_and_a_window_order_one() -> None:
    arms = (TrainedArm("encoder", "attention alone", 2), TrainedArm("encoder", "attention alone", 2, "window(1)"))
    run = run_of(*arms)
    assert arms_of(run) == list(arms)
    cubic, linear = (Training(run, arm) for arm in arms)
    assert np.abs(cubic.order().values - 3).max() < 0.2
    assert np.abs(linear.order().values - 1).max() < 0.2
    assert (cubic.residual().values < linear.residual().values).all()
    # What the format shows agrees with exact arithmetic where the format can see it.
    seen, exact = linear.seen(), linear.residual()
    both = np.isin(seen.steps, exact.steps)
    assert np.abs(seen.values[both] - exact.values).max() < 0.5


@pytest.mark.slow
def test_whole_networks_are_cut_after_training_too() -> None:
    arm = TrainedArm("encoder", "whole", 2)
    training = Training(run_of(arm), arm)
    assert set(arm.cuts) == {"no skip", "no skip, no norm", "no skip, no MLP", "attention alone"}
    for cut in arm.cuts:
        assert training.cut_after(cut)[0] < training.residual().last[0] - 0.5
    assert TrainedArm("encoder", "no skip", 2).cuts == ()


@pytest.mark.slow
def test_weights_have_moved_only_after_the_first_step() -> None:
    training = Training(run_of(TrainedArm("encoder", "whole", 2)), TrainedArm("encoder", "whole", 2))
    moved = training.course("q_moved", lambda rows: float(rows["value"].to_numpy().max()))
    assert moved.first.max() == 0
    assert moved.last.min() > 0


def test_arms_have_names_of_their_own() -> None:
    for size in (FULL, SMALL):
        arms = list(size.arms())
        assert len({arm.name for arm in arms}) == len(arms)
        assert all(set(arm.name) <= set("abcdefghijklmnopqrstuvwxyzMLP0123456789-_") for arm in arms)
