"""The trained reproductions that the documentation shows, held against the print and against the laws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankscope.ext.papers.dong2021_circle.show import free_runs, widths
from rankscope.ext.papers.dong2021_paths.show import curve, guess, over_seeds, published_facts, seeds
from rankscope.ext.papers.long_paths.show import FALLING, FIXED, arm, arms
from rankscope.runs.run import Run

HOME = Path(__file__).resolve().parents[3] / "docs" / "data" / "reproductions"


@pytest.fixture(scope="module", params=["sort", "hull", "memory"])
def paths(request) -> Run:
    return Run.load(HOME / f"dong2021-paths-{request.param}")


def test_whole_networks_are_at_or_above_the_published_accuracy(paths: Run) -> None:
    whole = over_seeds(paths, "accuracy", of="whole", paths="all")
    assert whole.mean >= published_facts(paths.extra["task"])["whole"]
    assert seeds(paths) >= 3
    ceiling = guess(paths, "twins")
    assert ceiling is None or whole.mean <= ceiling.mean


def test_nothing_that_looks_at_no_other_token_beats_the_best_table(paths: Run) -> None:
    """A path past all attention answers from the token alone."""
    best = guess(paths, "token alone")
    if best is None:
        pytest.skip("points have no table")
    judged_on_a_part = 0.06 if paths.extra["judged"] else 0.0
    for of in ("frozen", "recomputed"):
        assert curve(paths, "accuracy", of, "20")[0].mean <= best.mean + judged_on_a_part


def test_the_longest_paths_barely_beat_chance_in_either_meaning(paths: Run) -> None:
    chance = guess(paths, "constant")
    assert chance is not None
    for of in ("frozen", "recomputed"):
        assert curve(paths, "accuracy", of, "20")[-1].mean <= chance.mean + 0.05


def test_the_circle_is_unstable_by_the_cubic_law_without_a_skip_and_not_with_one() -> None:
    run = Run.load(HOME / "dong2021-circle")
    for width in widths(run):
        for free in free_runs(run, "attention", width):
            assert 2.5 < free.radial < 3.5
            assert free.end != "kept"
        for free in free_runs(run, "attention + skip + MLP", width):
            assert free.radial < 1.2


def test_exact_and_float64_distances_agree_while_float64_sees_them() -> None:
    run = Run.load(HOME / "dong2021-circle")
    for width in widths(run):
        for variant in ("attention", "attention + skip", "attention + MLP", "attention + skip + MLP"):
            for free in free_runs(run, variant, width):
                size = np.maximum(free.centre, free.distance)[: free.exact.size]
                seen = free.distance[: free.exact.size] > 1e-9 * size
                np.testing.assert_allclose(
                    free.exact[seen], np.log10(free.distance[: free.exact.size][seen]), rtol=0, atol=1e-6
                )


def test_without_skips_only_the_longest_paths_are_left() -> None:
    run = Run.load(HOME / "long-paths")
    for schedule in (FALLING, FIXED):
        found = arm(run, schedule, 0.0)
        assert found is not None
        assert found.mean_length.mean == run.extra["layers"]
    for found in arms(run):
        np.testing.assert_allclose(found.shares.sum(axis=1) + found.biases, 1.0, atol=1e-6)
