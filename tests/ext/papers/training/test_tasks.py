"""The tasks: pure functions of a seed, right by slow references."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from rankscope.ext.papers.training.tasks import IGNORED, circle_task, hull_task, memory_task, on_hull, sort_task


@pytest.mark.parametrize("make", [sort_task, hull_task, memory_task, circle_task])
def test_a_task_is_a_function_of_its_seed(make) -> None:
    first, again, other = make(1), make(1), make(2)
    name = next(iter(first.train.inputs))
    assert torch.equal(first.train.inputs[name], again.train.inputs[name])
    assert torch.equal(first.held.labels, again.held.labels)
    if make is not circle_task:
        assert first.train.labels.shape != other.train.labels.shape or not torch.equal(
            first.train.labels, other.train.labels
        )


def test_published_sizes() -> None:
    assert [(len(task.train), len(task.held)) for task in (sort_task(), hull_task(), memory_task())] == [
        (1000, 200),
        (10_000, 300),
        (500, 500),
    ]
    assert memory_task().tokens <= 128


def test_sorting_keeps_the_symbols_and_allows_repeats() -> None:
    task = sort_task(0, fresh=True)
    ids, labels = task.train.inputs["input_ids"], task.train.labels
    assert all(sorted(row) == answer for row, answer in zip(ids.tolist(), labels.tolist(), strict=True))
    assert any(len(set(row)) < len(row) for row in ids.tolist())
    assert not {tuple(row) for row in ids.tolist()} & {tuple(row) for row in task.held.inputs["input_ids"].tolist()}


def test_hull_corners_against_every_triangle() -> None:
    """A point is no corner exactly if some triangle of the others holds it."""
    clouds = np.random.default_rng(0).normal(size=(40, 7, 2))

    def inside(point, corners) -> bool:
        edges = zip(corners, np.roll(corners, -1, axis=0), strict=True)
        sides = [np.sign(np.linalg.det(np.stack([b - a, point - a]))) for a, b in edges]
        return len(set(sides)) == 1

    for cloud, found in zip(clouds, on_hull(clouds), strict=True):
        for number, point in enumerate(cloud):
            others = np.delete(cloud, number, axis=0)
            held = any(inside(point, others[list(three)]) for three in itertools.combinations(range(6), 3))
            assert found[number] == (not held)


def test_memory_has_a_bit_for_every_token_and_none_for_padding() -> None:
    task = memory_task(0)
    mask = task.train.inputs["attention_mask"].bool()
    assert set(task.train.labels[mask].tolist()) == {0, 1}
    assert set(task.train.labels[~mask].tolist()) == {IGNORED}
    assert set(task.train.inputs["input_ids"][~mask].tolist()) == {0}
    cut = task.train.take(torch.tensor([0, 1]))
    assert cut.labels.shape[1] == int(mask[:2].sum(dim=1).max())
    assert int((cut.labels >= 0).sum()) == int(mask[:2].sum())


def test_the_circle_turns_by_one_angle_and_stays_opposed() -> None:
    task = circle_task(angles=12)
    start, then = task.train.inputs["points"], task.train.labels
    turn = 2 * math.pi / 12
    rotation = torch.tensor([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]], dtype=torch.float64)
    torch.testing.assert_close(start @ rotation, then, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(start.sum(dim=1), torch.zeros(12, 2, dtype=torch.float64))
