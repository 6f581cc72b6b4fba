"""Our two-sided statements on random layers, and against the dense matrix they never form."""

from __future__ import annotations

import math

import pytest
import torch

from rankscope.theory.theorems import THEOREMS
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
