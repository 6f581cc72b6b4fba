"""Our two-sided statements on random layers, and against the dense matrix they never form."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rankscope.ext.theory.bound.reading import SeenLayer, head_sizes, passage_of
from rankscope.ext.theory.theorems import THEOREMS, LayerQuantities, Network
from tests.ext.theory.theorems.networks import attention, one_head, pick, rand, random_heads, simulate, violations

INSTANCES = pytest.mark.parametrize("instances", [100, pytest.param(500, marks=pytest.mark.slow)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["contraction_interval", "skip_interval", "cubic_law_interval"])
@INSTANCES
def test_the_measured_value_is_inside(name: str, instances: int) -> None:
    generator = torch.Generator().manual_seed(1)
    skip = 1.0 if name == "skip_interval" else 0.0
    positive = 0
    for number in range(instances):
        dim, n, heads = pick(generator, 1, 6), pick(generator, 2, 8), pick(generator, 1, 3)
        weights = [random_heads(generator, dim, heads, 2, pick(generator, 1, 3))]
        X = rand(generator, dim) + 0.3 ** (number % 6) * rand(generator, n, dim)
        mask = torch.ones(n, n).tril().bool() if number % 2 and name != "cubic_law_interval" else None
        found = simulate(weights, X, skip=skip, mask=mask, cubic=True)
        evaluation = THEOREMS[name].function(found.network, found.layers)
        assert evaluation.layers[0].log_upper is not None
        assert violations(evaluation) == []
        positive += evaluation.layers[0].log_lower > -math.inf
    assert positive > instances // 10


def test_over_the_depth_of_attention_alone_the_ends_multiply_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        weights = [random_heads(generator, 4, 2, 2, 2) for _ in range(3)]
        found = simulate(weights, 0.3 * rand(generator, 6, 4), mask=torch.ones(6, 6).tril().bool())
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
    found = simulate([heads], rand(generator, 4, 5), mask=torch.eye(4).flip(0).bool())
    evaluation = THEOREMS["contraction_interval"].function(found.network, found.layers)
    layer = evaluation.layers[0]
    assert layer.log_measured == pytest.approx(0.0, abs=1e-13)
    assert 0 <= layer.log_width < 1e-11


def test_skip_and_attention_of_unequal_gain_cannot_cancel() -> None:
    generator = torch.Generator().manual_seed(4)
    found = simulate([one_head(rand(generator, 3, 3), 0.01 * rand(generator, 3, 3))], rand(generator, 5, 3), skip=1.0)
    evaluation = THEOREMS["skip_interval"].function(found.network, found.layers)
    assert evaluation.layers[0].log_lower > math.log(0.9)


def test_a_mask_or_positions_silence_the_cubic_law() -> None:
    generator = torch.Generator().manual_seed(5)
    found = simulate([random_heads(generator, 3, 1, 2, 2)], rand(generator, 4, 3), mask=torch.ones(4, 4).tril().bool())
    evaluation = THEOREMS["cubic_law_interval"].function(found.network, found.layers)
    assert evaluation.failed == ("every row sees every token",)
    assert evaluation.layers[0].log_upper is None


def with_sinks(heads, X: torch.Tensor, sinks: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Attention with a learned score per head that takes part in the softmax and carries no value."""
    scores = heads.scale * (X @ heads.W_Q) @ (X @ heads.W_K).mT
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    wide = torch.cat((scores, sinks[:, None, None].expand(-1, X.shape[0], 1)), -1)
    return torch.softmax(wide, -1)[..., :-1]


def sunk(generator: torch.Generator, size: float, skip: float = 0.0) -> tuple[Network, list[LayerQuantities]]:
    n, dim, heads = pick(generator, 2, 7), pick(generator, 1, 5), pick(generator, 1, 3)
    weights = random_heads(generator, dim, heads, 2, pick(generator, 1, 3))
    weights = replace(weights, b_V_groups=rand(generator, *weights.b_V_groups.shape))
    X = 3 * rand(generator, dim) + size * rand(generator, n, dim)
    P = with_sinks(weights, X, rand(generator, heads) - 2)
    given = (P @ (X @ weights.W_V + weights.b_V[:, None]) @ weights.W_O).sum(0)
    summed = given + skip * X
    passage = passage_of(
        weights,
        SeenLayer(X, X, given, summed, summed),
        P,
        skip_gain=skip or None,
        position="none",
        floor=4 * torch.finfo(torch.float64).eps,
    )
    layer = LayerQuantities(0, passage, head_sizes(weights), weights.scale)
    return Network(1, heads, dim, pure=not skip, has_skip=bool(skip)), [layer]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("skip", [0.0, 1.0, -0.5])
def test_with_sinks_the_leak_of_what_tokens_share_is_in_the_interval(skip: float) -> None:
    generator = torch.Generator().manual_seed(11)
    name = "skip_interval" if skip else "contraction_interval"
    broken = leaks = 0
    for number in range(200):
        network, layers = sunk(generator, 0.3 ** (number % 8), skip)
        evaluation = THEOREMS[name].function(network, layers)
        assert evaluation.applies, evaluation.failed
        assert violations(evaluation) == []
        gains = layers[0].passage.sum_gains if skip else layers[0].passage.gains
        leaks += gains.leak > 0
        bare = gains.narrowest[1] - gains.leak
        broken += math.exp(evaluation.layers[0].log_measured) > bare * (1 + 1e-9)
    assert leaks > 150
    assert broken > (20 if skip else 100)  # the interval of rows that add up to one is wrong here


def test_rows_that_do_not_add_up_to_one_silence_what_needs_them() -> None:
    generator = torch.Generator().manual_seed(12)
    network, layers = sunk(generator, 0.3)
    for name in ("dong_2021_multi_head", "cubic_law_interval", "wu_2024_masks", "zhai_2023_entropy"):
        failed = THEOREMS[name].function(network, layers).failed
        assert "rows of attention add up to one" in failed, name


@pytest.mark.parametrize("twist", ["temperature", "cap", "distance"])
def test_attention_that_is_not_the_softmax_of_its_scores_is_noticed(twist: str) -> None:
    """A family description that does not tell: the statements that start from weights look at attention itself."""
    generator = torch.Generator().manual_seed(13)
    weights, X = random_heads(generator, 3, 2, 2, 2), rand(generator, 5, 3)
    scores = weights.scale * (X @ weights.W_Q) @ (X @ weights.W_K).mT
    place = torch.arange(5.0).double()
    scores = {
        "temperature": 3 * scores,
        "cap": torch.tanh(scores),
        "distance": scores - (place[:, None] - place).abs(),
    }[twist]
    P = torch.softmax(scores, -1)
    given = (P @ (X @ weights.W_V) @ weights.W_O).sum(0)
    passage = passage_of(weights, SeenLayer(X, X, given, given, given), P, skip_gain=None, position="none", floor=1e-15)
    layers = [LayerQuantities(0, passage, head_sizes(weights), weights.scale)]
    for name in ("dong_2021_multi_head", "cubic_law_interval"):
        evaluation = THEOREMS[name].function(Network(1, 2, 3, pure=True), layers)
        assert "attention is the softmax of query times key" in evaluation.failed


def test_what_is_measured_is_what_the_model_gave() -> None:
    """Attention's output scaled by 1.5 behind the back of its heads: the measured value follows, and it is noticed."""
    generator = torch.Generator().manual_seed(14)
    weights, X = random_heads(generator, 3, 2, 2, 2), rand(generator, 5, 3)
    P = attention(weights, X, None)
    given = 1.5 * (P @ (X @ weights.W_V) @ weights.W_O).sum(0)
    passage = passage_of(weights, SeenLayer(X, X, given, given, given), P, skip_gain=None, position="none", floor=1e-15)
    layers = [LayerQuantities(0, passage, head_sizes(weights), weights.scale)]
    found = THEOREMS["contraction_interval"].function(Network(1, 2, 3, pure=True), layers)
    want = float((given - given.mean(0)).norm() / (X - X.mean(0)).norm())
    assert math.exp(found.layers[0].log_measured) == pytest.approx(want, rel=1e-12)
    assert found.failed == ("what attention gives is the sum of its heads",)


def test_attention_to_tokens_that_do_not_count_is_noticed() -> None:
    generator = torch.Generator().manual_seed(15)
    weights, X = random_heads(generator, 3, 1, 2, 2), rand(generator, 5, 3)
    P, keep = attention(weights, X, None), slice(0, 4)
    given = (P @ (X @ weights.W_V) @ weights.W_O).sum(0)[keep]
    passage = passage_of(
        weights,
        SeenLayer(X[keep], X[keep], given, given, given),
        P[:, keep, keep],
        skip_gain=None,
        position="none",
        floor=1e-15,
        outside=float(P[:, keep, 4].max()),
    )
    layers = [LayerQuantities(0, passage, head_sizes(weights), weights.scale)]
    found = THEOREMS["contraction_interval"].function(Network(1, 1, 3), layers)
    assert "attention stays within the tokens that count" in found.failed
