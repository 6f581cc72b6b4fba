from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import InputError
from rankscope.monitor.schedules import Jumps, Linear, Schedule, WallTime, as_schedule, dense_start


def steps_read(schedule: Schedule, steps: list[int], seconds_per_step: float = 1.0, cost: float = 0.0) -> list[int]:
    now, read = 0.0, []
    for step in steps:
        now += seconds_per_step
        if schedule.wants(step, now):
            now += cost
            schedule.was_read(step, cost)
            read.append(step)
    return read


def test_linear_reads_the_first_step_and_then_one_in_so_many() -> None:
    assert steps_read(Linear(4), list(range(10))) == [0, 4, 8]
    assert steps_read(Linear(4), list(range(3, 14))) == [3, 4, 8, 12]


@given(
    cost=st.floats(1e-4, 20.0),
    seconds_per_step=st.floats(1e-3, 10.0),
    share=st.sampled_from([0.001, 0.01, 0.1]),
)
def test_wall_time_is_never_exceeded_by_more_than_the_dense_start(
    cost: float, seconds_per_step: float, share: float
) -> None:
    steps = 2000
    read = steps_read(WallTime(share), list(range(steps)), seconds_per_step, cost)
    elapsed = (steps - 1) * seconds_per_step + len(read) * cost
    dense = sum(dense_start(step, step - 1) for step in range(steps))
    assert len(read) <= dense or (len(read) - dense - 1) * cost <= share * elapsed * (1 + 1e-9)


@pytest.mark.parametrize(("steps", "least"), [(20, 13), (100, 20), (300, 20), (1000, 20)])
def test_short_runs_have_twenty_readings_even_if_one_costs_more_than_a_step(steps: int, least: int) -> None:
    """The loop of the documentation: a first reading of 1.04 s, then 0.34 s, steps of 0.09 s."""
    schedule, now, read = WallTime(0.01), 0.0, []
    for step in range(steps):
        now += 0.09
        if schedule.wants(step, now):
            seconds = 0.34 if read else 1.04
            now += seconds
            schedule.was_read(step, seconds)
            read.append(step)
    assert len(read) >= least
    assert read[:9] == [*range(9)]
    assert max(later - earlier for earlier, later in pairwise(read)) <= max(1, steps // 4)


def test_steps_after_a_jump_of_the_loss_are_read_and_noise_is_not_a_jump() -> None:
    schedule, read = WallTime(0.01), []
    for step in range(400):
        noise = 0.1 * ((7 * step) % 11) / 11
        schedule.notice(step, "loss", noise + (2.0 if step < 203 else 3.0))
        if schedule.wants(step, 0.0):
            schedule.was_read(step, 1.0)
            read.append(step)
    assert {203, 204, 206, 211, 215, 219} <= set(read)
    assert len(read) <= sum(dense_start(step, step - 1) for step in range(400)) + 6


def test_jumps_that_repeat_are_read_less_and_less_often() -> None:
    jumps, read = Jumps(), 0
    for step in range(2000):
        jumps.take(step, "loss", 9.0 if step % 20 == 0 else 2.0 + 0.01 * (step % 3))
        read += jumps.wants(step)
    assert 12 <= read <= 60


def test_wall_time_is_used_and_adapts_to_the_cost() -> None:
    cheap = steps_read(WallTime(0.01), list(range(10_000)), 1.0, cost=0.1)
    assert (
        0.9 * 1010 <= len(cheap) <= 1060
    )  # the dense start, and of 10,000 seconds and what the readings themselves took
    dear = steps_read(WallTime(0.01), list(range(10_000)), 1.0, cost=1.0)
    assert 0.9 * 101 <= len(dear) <= 101 + 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [(5, Linear(5)), ("1%", WallTime(0.01)), ("0.5 %", WallTime(0.005))],
)
def test_words_for_schedules(given: str | int, expected: Schedule) -> None:
    assert as_schedule(given) == expected


@pytest.mark.parametrize("given", [0, -1, True, "often", "0%", "100%", "1", "%", "nan%"])
def test_nonsense_is_refused(given: str | int) -> None:
    with pytest.raises(InputError):
        as_schedule(given)
