"""A short search by gradient descent for networks that break a statement, and wrong statements for it to find."""

from __future__ import annotations

import math

import pytest
from scipy.sparse.csgraph import shortest_path

from rankscope.ext.theory import contraction
from rankscope.ext.theory.theorems import THEOREMS, wu_2024_masks
from rankscope.ext.theory.theorems._decay import Window
from rankscope.ext.theory.theorems._quantities import Passage
from tests.ext.theory.theorems import attacking
from tests.ext.theory.theorems.attacking import SLACKS, Outcome, attack, design

SEEDS = 4


def search(name: str, seeds: int, steps: int = 30) -> list[Outcome]:
    return [attack(name, seed, steps) for seed in range(seeds)]


def test_every_bound_is_searched() -> None:
    built = {"dong_2021_skip", "wu_2024_equilibria"}
    assert set(SLACKS) | built == set(THEOREMS)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SLACKS)
def test_no_network_is_found_that_breaks_a_statement(name: str) -> None:
    found = search(name, SEEDS)
    assert [broken for outcome in found for broken in outcome.broken] == []
    assert sum(outcome.tested for outcome in found) > 50


@pytest.mark.slow
def test_the_search_lowers_the_slack() -> None:
    tried = lower = 0
    for name in ("dong_2021_single_head", "skip_interval", "zhai_2023_entropy"):
        for seed in range(5):
            before, after = (attack(name, seed, steps).slacks.get(name, math.inf) for steps in (0, 40))
            tried += math.isfinite(before)
            lower += after < before
    assert tried >= 7
    assert lower > tried / 2


def test_the_networks_searched_have_sinks_shared_keys_changing_masks_and_values_that_are_not_square() -> None:
    drawn = [design(name, seed) for name in SLACKS for seed in range(30)]
    assert any(d.twist == "sink" for d in drawn)
    assert any(d.groups < d.heads for d in drawn)
    assert any(len({m.numpy().tobytes() for m in d.masks}) > 1 for d in drawn)
    assert any(d.parameters["0.W_V"].shape[1] != d.parameters["0.W_V"].shape[2] for d in drawn)


@pytest.mark.slow
def test_the_search_finds_the_radius_of_single_masks_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the statements on masks once did: windows as long as the radius of a single graph."""

    def of_each(seen: list[Passage], first: int = 0, *, all_sources: bool = False) -> list[Window]:
        radius = int(shortest_path(seen[0].graph.edges().T, unweighted=True).max(axis=1).min())
        return [Window(last, radius, 1) for last in range(first + radius - 1, len(seen), radius)]

    monkeypatch.setattr(wu_2024_masks, "windows", of_each)
    monkeypatch.setattr(attacking, "_reach", lambda layers, *_: [(n, 2, 1) for n in range(1, len(layers), 2)])
    found = search("wu_2024_masks", 10)
    assert any(broken.startswith("wu_2024_masks") for outcome in found for broken in outcome.broken)


@pytest.mark.slow
def test_the_search_finds_sinks_without_their_leak_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = contraction._leak
    monkeypatch.setattr(contraction, "_leak", lambda P, shared, W_O: 0 * plain(P, shared, W_O))
    found = search("contraction_interval", 12)
    assert any(broken.startswith("contraction_interval") for outcome in found for broken in outcome.broken)


@pytest.mark.slow
def test_the_search_finds_a_bound_that_is_a_percent_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    from rankscope.ext.theory.theorems import zhai_2023_entropy as zhai

    plain = zhai.log_entropy_bound
    monkeypatch.setattr(zhai, "log_entropy_bound", lambda *given: plain(*given) + 0.01)
    found = search("zhai_2023_entropy", 12, steps=60)
    assert any(broken.startswith("zhai_2023_entropy") for outcome in found for broken in outcome.broken)
