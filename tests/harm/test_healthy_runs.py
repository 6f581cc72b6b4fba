"""Healthy runs of many kinds: no alarm, at a reading every other step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rankscope as rs
from tests.harm import healthy


def alarms(program: healthy.Program, seed: int = 0, **options: Any) -> list[str]:
    """What a healthy program is alarmed of."""
    torch.manual_seed(seed)
    watches: list[Any] = []
    losses = program(
        lambda model, optimizer: watches.append(rs.watch(model, optimizer, actions=(), **options)),
    )
    for watch in watches:
        watch.close()
    assert losses[-1] == losses[-1]
    assert watches
    return [alarm.sentence for watch in watches for alarm in watch.alarms]


@pytest.mark.slow
@pytest.mark.parametrize("program", healthy.PROGRAMS, ids=lambda program: program.__name__)
def test_a_healthy_run_is_not_alarmed(program: healthy.Program) -> None:
    assert alarms(program, schedule=2) == []


@pytest.mark.parametrize(
    "program",
    [
        healthy.transformer_encoder,
        # The longest trainings of the ordinary tests; those of all kinds are slow tests above.
        pytest.param(healthy.relora, marks=pytest.mark.slow),
        pytest.param(healthy.contrastive, marks=pytest.mark.slow),
    ],
)
def test_healthy_runs_that_were_alarmed_for_what_they_are(program: healthy.Program) -> None:
    assert alarms(program, schedule=4) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 20))
def test_a_small_gpt_is_not_alarmed(seed: int) -> None:
    assert alarms(healthy.nanogpt, seed, schedule=2) == []


@pytest.mark.parametrize("seed", range(2))
def test_two_small_gpts_are_not_alarmed(seed: int) -> None:
    assert alarms(healthy.nanogpt, seed, schedule=4) == []
