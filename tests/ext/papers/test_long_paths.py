"""Gain schedules and what they leave of path lengths."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.ext.papers._spec import Settings
from rankscope.ext.papers.long_paths.run import gain_at, measure
from rankscope.ext.papers.long_paths.show import FALLING, FIXED, arm, arms


@pytest.fixture(scope="module")
def run():
    return measure(Settings("long-paths", small=True))


def test_the_gain_falls_straight_and_stays() -> None:
    gains = [gain_at(step, 10, 0.0) for step in range(10)]
    assert gains[0] == 1.0
    np.testing.assert_allclose(np.diff(gains[:7]), -1 / 6)
    assert gains[6:] == [0.0] * 4


def test_without_skips_there_are_only_the_longest_paths(run) -> None:
    for schedule in (FALLING, FIXED):
        found = arm(run, schedule, 0.0)
        assert found is not None
        assert not found.shares[:, :-1].any()
        assert found.lengths.tolist() == [3.0]


def test_shares_and_biases_make_up_the_output(run) -> None:
    for found in arms(run):
        np.testing.assert_allclose(found.shares.sum(axis=1) + found.biases, 1.0, atol=1e-6)


def test_the_plain_network_comes_first(run) -> None:
    assert next((found.gain, found.schedule) for found in arms(run)) == (1.0, FIXED)
    assert len(arms(run)) == 5
