"""The map of designs: its statistics against slow references, its grid, its verdicts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rankscope.ext.papers.width_depth.ranks import area_under_curve, mean_ranks, rank_correlation, with_interval
from rankscope.ext.papers.width_depth.run import FULL, SMALL, MapCell
from rankscope.ext.papers.width_depth.show import Networks, best_cut, skills

FEW = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4)), min_size=2, max_size=12)


@given(FEW)
def test_area_is_the_share_of_pairs_in_order(pairs: list[tuple[int, int]]) -> None:
    score, outcome = (np.array(side, dtype=np.float64) for side in zip(*pairs, strict=True))
    won = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, learnt in zip(score, outcome >= 2, strict=True)
        if learnt
        for b, failed in zip(score, outcome < 2, strict=True)
        if failed
    ]
    found = area_under_curve(score, outcome, 2)
    assert found == pytest.approx(np.mean(won), rel=1e-12) if won else np.isnan(found)


@given(FEW)
def test_ranks_and_their_correlation_are_those_of_scipy(pairs: list[tuple[int, int]]) -> None:
    score, outcome = (np.array(side, dtype=np.float64) for side in zip(*pairs, strict=True))
    assert mean_ranks(score).tolist() == stats.rankdata(score).tolist()
    found = rank_correlation(score, outcome)
    if np.ptp(score) == 0 or np.ptp(outcome) == 0:
        assert np.isnan(found)
    else:
        assert found == pytest.approx(stats.spearmanr(score, outcome).statistic, abs=1e-9)


def test_more_seeds_of_the_same_designs_do_not_narrow_the_interval() -> None:
    random = np.random.default_rng(0)
    score, noise = random.normal(size=40), random.normal(size=40)
    outcome, group = score + noise, np.arange(40)
    one = with_interval(rank_correlation, score, outcome, group)
    three = with_interval(rank_correlation, np.tile(score, 3), np.tile(outcome, 3), np.tile(group, 3))
    apart = with_interval(rank_correlation, np.tile(score, 3), np.tile(outcome, 3), np.arange(120))
    assert three.high - three.low == pytest.approx(one.high - one.low, rel=0.1)
    assert apart.high - apart.low < 0.75 * (one.high - one.low)


@pytest.mark.slow
def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Spearman's correlation of bivariate normals is known: (6/pi) asin(rho/2). 200 samples of 60, 95% intervals."""
    truth, hits = 6 / np.pi * np.arcsin(0.6 / 2), 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        x = random.normal(size=60)
        y = 0.6 * x + 0.8 * random.normal(size=60)
        found = with_interval(rank_correlation, x, y, np.arange(60), draws=200, seed=seed)
        hits += found.low <= truth <= found.high
    assert 0.87 <= hits / 200 <= 0.99


@pytest.mark.parametrize("size", [FULL, SMALL])
def test_every_design_of_the_grid_is_one_of_a_kind(size: type(FULL)) -> None:  # type: ignore[valid-type]
    cells = list(size.cells())
    assert len({cell.name for cell in cells}) == len(cells) == len(set(cells))
    assert all(cell.width % cell.heads == 0 for cell in cells)


def test_weights_keep_the_size_of_a_token_unless_told_otherwise() -> None:
    assert MapCell(2, 64, 4, 1.0).std == 0.125
    assert MapCell(2, 64, 4, 1.0, 0.02).std == 0.02


def made_up(predicted: list[float], accuracy: list[float]) -> Networks:
    designs = tuple((2 + number, 32, 4, "1", "0.1768") for number in range(len(predicted)))
    scores, reached = np.array(predicted), np.array(accuracy)
    return Networks(designs, np.zeros(len(predicted), dtype=np.int64), scores, scores, reached, 1 - reached, 0.5)


def test_the_best_cut_separates_what_can_be_separated() -> None:
    networks = made_up([-9.0, -3.0, -1.0, -0.5], [0.1, 0.2, 0.8, 0.9])
    assert best_cut(networks) == -1.0
    assert skills(networks)[0].area.value == 1.0
    assert np.isnan(best_cut(made_up([-1.0, -2.0], [0.9, 0.9])))
