"""Our two-sided statements on random layers, and against the dense matrix they never form."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rankscope.theory.contraction import Gains, Interval
from rankscope.theory.lanczos import LanczosEnds
from rankscope.theory.theorems import THEOREMS
from rankscope.theory.theorems.contraction_interval import narrowest
from tests.theory.theorems.networks import one_head, pick, rand, random_heads, simulate, violations

INSTANCES = 500


@pytest.mark.parametrize("name", ["contraction_interval", "skip_interval", "cubic_law_interval"])
def test_the_measured_value_is_inside(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    skip = 1.0 if name == "skip_interval" else 0.0
    positive = 0
    for number in range(INSTANCES):
        dim, n, heads = pick(generator, 1, 6), pick(generator, 2, 8), pick(generator, 1, 3)
        weights = [random_heads(generator, dim, heads, 2, pick(generator, 1, 3))]
        X = rand(generator, dim) + 0.3 ** (number % 6) * rand(generator, n, dim)
        mask = torch.ones(n, n).tril().bool() if number % 2 and name != "cubic_law_interval" else None
        found = simulate(weights, X, skip=skip, mask=mask, steps=4, cubic=True)
        evaluation = THEOREMS[name].function(found.network, found.layers)
        assert evaluation.layers[0].log_upper is not None
        assert violations(evaluation) == []
        positive += evaluation.layers[0].log_lower > -math.inf
    assert positive > INSTANCES // 10


def test_over_the_depth_of_attention_alone_the_ends_multiply_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        weights = [random_heads(generator, 4, 2, 2, 2) for _ in range(3)]
        found = simulate(weights, 0.3 * rand(generator, 6, 4), mask=torch.ones(6, 6).tril().bool(), steps=0)
        evaluation = THEOREMS["contraction_interval"].function(found.network, found.layers)
        whole = math.log(found.layers[-1].passage.stream_out.mu / found.layers[0].passage.stream_in.mu)
        assert evaluation.depth.log_measured == pytest.approx(whole, rel=1e-9)
        assert evaluation.depth.log_lower <= whole <= evaluation.depth.log_upper
        assert evaluation.applies


def test_a_lone_orthogonal_head_leaves_an_interval_of_no_width() -> None:
    """Attention that is a permutation, values that are orthogonal: every residual keeps its norm."""
    generator = torch.Generator().manual_seed(3)
    Q = torch.linalg.qr(rand(generator, 5, 5)).Q
    heads = one_head(torch.zeros(5, 5, dtype=torch.float64), Q)
    found = simulate([heads], rand(generator, 4, 5), mask=torch.eye(4).flip(0).bool(), steps=0)
    evaluation = THEOREMS["contraction_interval"].function(found.network, found.layers)
    layer = evaluation.layers[0]
    assert layer.log_measured == pytest.approx(0.0, abs=1e-13)
    assert 0 <= layer.log_width < 1e-11


def test_skip_and_attention_of_unequal_gain_cannot_cancel() -> None:
    generator = torch.Generator().manual_seed(4)
    found = simulate(
        [one_head(rand(generator, 3, 3), 0.01 * rand(generator, 3, 3))], rand(generator, 5, 3), skip=1.0, steps=0
    )
    evaluation = THEOREMS["skip_interval"].function(found.network, found.layers)
    assert evaluation.layers[0].log_lower > math.log(0.9)


def test_a_mask_or_positions_silence_the_cubic_law() -> None:
    generator = torch.Generator().manual_seed(5)
    found = simulate([random_heads(generator, 3, 1, 2, 2)], rand(generator, 4, 3), mask=torch.ones(4, 4).tril().bool())
    evaluation = THEOREMS["cubic_law_interval"].function(found.network, found.layers)
    assert evaluation.failed == ("every row sees every token",)
    assert evaluation.layers[0].log_upper is None


@pytest.mark.parametrize(
    ("free", "given", "likely", "want"),
    [
        ((1.0, 9.0), (2.0, 8.0), None, (2.0, 8.0)),
        ((3.0, 7.0), (2.0, 8.0), None, (3.0, 7.0)),
        ((1.0, 9.0), (2.0, 8.0), 5.0, (2.0, 5.0)),
        ((1.0, 9.0), (2.0, 8.0), math.inf, (2.0, 8.0)),
    ],
)
def test_the_narrowest_ends_are_kept(
    free: tuple[float, float], given: tuple[float, float], likely: float | None, want: tuple[float, float]
) -> None:
    ends = None if likely is None else LanczosEnds(4.0, likely, 3.0, 0.0, 5)
    assert narrowest(Gains(Interval(*free), Interval(*given), 1.0, 4.0, ends, 3)) == want


@pytest.mark.parametrize("name", ["contraction_interval", "skip_interval", "zhai_2023_entropy"])
def test_what_needs_activations_is_silent_on_weights_alone(name: str) -> None:
    generator = torch.Generator().manual_seed(6)
    found = simulate([random_heads(generator, 3, 1, 2, 2)] * 2, rand(generator, 4, 3), skip=1.0, steps=0)
    evaluation = THEOREMS[name].function(found.network, [replace(one, passage=None) for one in found.layers])
    assert [b.layer for b in evaluation.layers] == [0, 1]
    assert all(b.log_upper is b.log_lower is b.log_measured is None for b in evaluation.layers)
    assert evaluation.depth is None
    assert evaluation.sentence.startswith(
        {
            "contraction_interval": "The gains of no layer were computed",
            "skip_interval": "A norm stands before attention in every layer, or there is no skip",
            "zhai_2023_entropy": "The size of the logits cannot be told",
        }[name]
    )


def test_a_layer_without_gains_leaves_the_depth_open() -> None:
    generator = torch.Generator().manual_seed(7)
    found = simulate([random_heads(generator, 3, 1, 2, 2)] * 2, rand(generator, 4, 3), steps=0)
    second = found.layers[1]
    bare = replace(second, passage=replace(second.passage, gains=None))
    evaluation = THEOREMS["contraction_interval"].function(found.network, [found.layers[0], bare])
    assert evaluation.layers[0].log_upper is not None
    assert evaluation.layers[1].log_upper is None
    assert evaluation.depth is None
    assert "in 1 of 1 layers" in evaluation.sentence


@pytest.mark.parametrize("floors", [(False, False), (True, False), (False, True)])
def test_over_the_depth_ends_add_up_in_logs_and_rounding_in_one_layer_is_rounding_of_all(
    floors: tuple[bool, bool],
) -> None:
    generator = torch.Generator().manual_seed(8)
    found = simulate([random_heads(generator, 3, 1, 3, 3) for _ in floors], rand(generator, 4, 3), steps=0)
    layers = [
        replace(one, passage=replace(one.passage, at_floor=floor))
        for one, floor in zip(found.layers, floors, strict=True)
    ]
    evaluation = THEOREMS["contraction_interval"].function(found.network, layers)
    for end in ("log_upper", "log_lower", "log_measured"):
        assert getattr(evaluation.depth, end) == sum(getattr(b, end) for b in evaluation.layers)
    assert evaluation.depth.at_floor == any(floors)
    assert [b.at_floor for b in evaluation.layers] == list(floors)
    assert evaluation.depth.hypotheses[0].holds
