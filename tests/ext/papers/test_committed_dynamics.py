"""The watched trainings and the map that the documentation shows: what the pages claim is in the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankscope.ext.papers.training.baselines import one_answer_per_sequence
from rankscope.ext.papers.training.tasks import sort_task
from rankscope.ext.papers.training_fights_collapse.arms import OWN, TrainedArm
from rankscope.ext.papers.training_fights_collapse.show import Training, arms_of
from rankscope.ext.papers.width_depth.ranks import rank_correlation
from rankscope.ext.papers.width_depth.show import Networks, networks_of, skills
from rankscope.runs.run import Run

HOME = Path(__file__).resolve().parents[3] / "docs" / "data" / "reproductions"
FLOAT32 = -7.0


@pytest.fixture(scope="module")
def trainings() -> dict[TrainedArm, Training]:
    run = Run.load(HOME / "training-fights-collapse")
    return {arm: Training(run, arm) for arm in arms_of(run)}


@pytest.fixture(scope="module")
def networks() -> Networks:
    return networks_of(Run.load(HOME / "width-depth"))


def is_cubic(arm: TrainedArm) -> bool:
    """No skip, every token sees every token: order 3 whatever the weights."""
    return arm.family == "encoder" and arm.mask == OWN and arm.operation.attention_skip == 0


def is_gone(arm: TrainedArm) -> bool:
    """The same with four blocks, trained as long as the others."""
    return is_cubic(arm) and arm.depth > 2 and arm.longer == 1


def test_every_network_has_three_seeds(trainings: dict[TrainedArm, Training]) -> None:
    assert all(training.seeds.tolist() == [0, 1, 2] for training in trainings.values())


def test_the_order_is_a_matter_of_architecture_and_training_leaves_it(trainings: dict[TrainedArm, Training]) -> None:
    for arm, training in trainings.items():
        if is_gone(arm):
            assert np.abs(training.order().values - 3).max() < 0.2, arm
        elif not is_cubic(arm):
            assert training.order().values.max() < 2, arm


def test_what_float32_cannot_see_does_not_come_back_soon(trainings: dict[TrainedArm, Training]) -> None:
    hidden = {arm for arm, training in trainings.items() if (training.residual().first < FLOAT32).all()}
    assert hidden == {arm for arm in trainings if is_cubic(arm) and arm.depth > 2}
    for training in (trainings[arm] for arm in trainings if is_gone(arm)):
        assert training.residual().values.max() < FLOAT32
        assert training.ratio().values.max() < 1e-4


def test_a_collapsed_network_gives_one_answer_per_sequence_and_no_more(trainings: dict[TrainedArm, Training]) -> None:
    most = [one_answer_per_sequence(sort_task(seed, fresh=True).held.labels) for seed in range(3)]
    for arm, training in trainings.items():
        if is_gone(arm):
            # Rounding may break a tie between two symbols differently from token to token.
            assert (training.accuracy() <= np.array(most) + 0.005).all(), arm
            assert (training.accuracy() > np.array(most) - 0.05).all(), arm


def test_attention_alone_comes_back_when_it_is_trained_longer(trainings: dict[TrainedArm, Training]) -> None:
    patient = next(t for arm, t in trainings.items() if arm.longer > 1 and arm.variant == "attention alone")
    assert (patient.residual().first < -20).all()
    assert (patient.residual().last > FLOAT32).all()
    assert (patient.accuracy() > 0.5).all()


def test_what_it_can_see_is_undone(trainings: dict[TrainedArm, Training]) -> None:
    for arm, training in trainings.items():
        if arm.mask != OWN or (arm.family == "causal" and arm.operation.attention_skip == 0) or arm.depth == 2:
            assert (training.residual().last > training.residual().first + 0.3).all(), arm
            assert (training.residual().last > -0.5).all(), arm


def test_the_prediction_is_that_of_the_networks(networks: Networks) -> None:
    assert rank_correlation(networks.predicted, networks.measured) > 0.95
    seen = networks.measured > -10
    assert np.median(np.abs(networks.predicted - networks.measured)[seen]) < 0.15


def test_the_prediction_tells_more_than_depth_or_gain_alone(networks: Networks) -> None:
    areas = {skill.name: skill.area for skill in skills(networks)}
    assert areas["predict"].low > areas["fewer blocks"].value
    assert areas["predict"].value > areas["larger gain"].value
    assert set(networks.seed) == {0, 1}


def test_no_network_predicted_to_agree_learns(networks: Networks) -> None:
    assert not networks.learnt[networks.predicted < -3].any()
    assert (networks.predicted < -3).sum() >= 10
