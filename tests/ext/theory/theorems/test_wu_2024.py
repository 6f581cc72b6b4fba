"""Theorems 1 to 3 and corollary 1 on random networks inside and outside their hypotheses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.sparse.csgraph import shortest_path

from rankscope.errors import InputError
from rankscope.ext.theory.theorems import THEOREMS
from rankscope.ext.theory.theorems._decay import log_rate, windows
from rankscope.ext.theory.theorems._spec import powers_of_ten
from rankscope.ext.theory.theorems.wu_2024_equilibria import attended, equilibrium, equilibrium_values
from tests.ext.theory.theorems.networks import one_head, pick, rand, simulate, violations

INSTANCES = pytest.mark.parametrize("instances", [100, pytest.param(500, marks=pytest.mark.slow)])


def masks(n: int) -> list[torch.Tensor]:
    """Complete, causal, a causal window, a band, and a star."""
    full = torch.ones(n, n, dtype=torch.bool)
    band = full.tril(1) & full.triu(-1)
    star = torch.eye(n, dtype=torch.bool)
    star[:, 0] = True
    return [full, full.tril(), full.tril() & full.triu(-2), band, star]


def orthogonal(generator: torch.Generator, dim: int) -> torch.Tensor:
    return torch.linalg.qr(rand(generator, dim, dim)).Q


@INSTANCES
def test_thm_1_holds_inside_its_hypotheses(instances: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for number in range(instances):
        n, dim = pick(generator, 2, 7), pick(generator, 1, 5)
        weights = []
        for _ in range(pick(generator, 1, 4)):
            W = rand(generator, dim, dim)
            W = W / torch.linalg.matrix_norm(W, 2) * (1 - 1e-9)
            weights.append(one_head(0.3 * rand(generator, dim, dim), W))
        found = simulate(weights, rand(generator, n, dim), mask=masks(n)[number % 5])
        evaluation = THEOREMS["wu_2024_masks"].function(found.network, found.layers)
        assert evaluation.applies, evaluation.failed
        assert violations(evaluation) == []


def test_thm_1_needs_a_token_that_reaches_all() -> None:
    """Two groups that do not see each other: the formula with r = 1 would say that everything is equal."""
    mask = torch.eye(2, dtype=torch.bool)
    eye = torch.eye(2, dtype=torch.float64)
    found = simulate([one_head(eye, eye)] * 4, eye, mask=mask)
    evaluation = THEOREMS["wu_2024_masks"].function(found.network, found.layers)
    assert evaluation.failed == ("a token that reaches every other",)
    mu = found.layers[-1].passage.stream_out.mu
    assert math.log(mu) > 4 * log_rate(found.layers[0].passage.least_edge, 1)


def unit_rows(X: torch.Tensor) -> torch.Tensor:
    return X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)


@INSTANCES
def test_cor_1_holds_inside_its_hypotheses(instances: int) -> None:
    generator = torch.Generator().manual_seed(2)
    for number in range(instances):
        n, dim = pick(generator, 2, 6), pick(generator, 2, 6)
        weights = [one_head(0.3 * rand(generator, dim, dim), orthogonal(generator, dim)) for _ in range(3)]
        X = unit_rows(rand(generator, n, dim).abs())
        found = simulate(weights, X, mask=masks(n)[number % 5], unit=True)
        evaluation = THEOREMS["wu_2024_nonnegative"].function(found.network, found.layers)
        assert evaluation.applies, evaluation.failed
        assert violations(evaluation) == []


@INSTANCES
def test_thm_2_holds_inside_its_hypotheses(instances: int) -> None:
    generator = torch.Generator().manual_seed(3)
    begun = 0
    for number in range(instances):
        n = pick(generator, 2, 5)
        dim = pick(generator, n, 7)
        weights = [one_head(0.3 * rand(generator, dim, dim), orthogonal(generator, dim)) for _ in range(4)]
        mask = (masks(n)[0], masks(n)[3])[number % 2]
        found = simulate(weights, unit_rows(rand(generator, n, dim)), mask=mask, unit=True)
        evaluation = THEOREMS["wu_2024_layernorm"].function(found.network, found.layers)
        assert evaluation.applies, evaluation.failed
        assert violations(evaluation) == []
        begun += "from no layer" not in evaluation.sentence
    assert begun > 0.8 * instances


def test_opposite_tokens_never_meet_where_cosines_are_negative_and_the_rank_is_not_full() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    X = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    found = simulate([one_head(eye, eye)] * 6, X, unit=True)
    for name, missing in (
        ("wu_2024_nonnegative", "least cosine at first"),
        ("wu_2024_layernorm", "tokens of full rank"),
    ):
        evaluation = THEOREMS[name].function(found.network, found.layers)
        assert missing in evaluation.failed
    epsilon = found.layers[0].passage.least_edge
    rate = 0.5 * log_rate(epsilon, 1, sources=2, power=2)
    assert math.log(found.layers[-1].passage.stream_out.mu) > 0.5 * math.log(2) + 6 * rate


def test_values_that_are_not_orthogonal_keep_tokens_apart() -> None:
    """An equilibrium of full rank: a centre, self-loops, unit length, and mu does not fall."""
    X, W = equilibrium(4, 4), equilibrium_values(4, 4)
    found = simulate([one_head(torch.zeros(4, 4, dtype=torch.float64), W)] * 5, X, mask=masks(4)[1], unit=True)
    evaluation = THEOREMS["wu_2024_nonnegative"].function(found.network, found.layers)
    assert "orthogonal values" in evaluation.failed
    assert found.layers[-1].passage.stream_out.mu == pytest.approx(found.layers[0].passage.stream_in.mu, rel=1e-12)


@pytest.mark.parametrize("tokens", [3, 4, 6])
def test_thm_3_equilibria_of_every_rank_are_fixed_to_rounding(tokens: int) -> None:
    W = equilibrium_values(tokens, tokens)
    for rank in range(1, tokens + 1):
        X = equilibrium(tokens, rank)
        assert int(torch.linalg.matrix_rank(X)) == rank
        assert torch.allclose(torch.linalg.vector_norm(X, dim=-1), torch.ones(tokens).double(), rtol=0, atol=4e-16)
        assert float((attended(X, W) - X).abs().max()) <= 5e-16


@INSTANCES
def test_thm_3_holds_for_random_sizes_and_weights(instances: int) -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(instances):
        tokens = pick(generator, 2, 9)
        rank = pick(generator, 1, tokens)
        weight = (tokens - rank + 1) * (1.0 + float(torch.rand(1, generator=generator)))
        X, W = equilibrium(tokens, rank, weight), equilibrium_values(tokens, weight)
        assert float((attended(X, W) - X).abs().max()) <= 4e-15


def test_thm_3_needs_the_weight_above_the_diagonal_to_be_large_and_the_values_to_fit() -> None:
    with pytest.raises(InputError, match="weight of at least 3"):
        equilibrium(4, 2, 2.0)
    X = equilibrium(4, 3)
    assert float((attended(X, equilibrium_values(4, 1.0)) - X).abs().max()) > 0.01


def test_wu_equilibria_evaluate_without_a_network_of_their_kind() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    found = simulate([one_head(eye, eye)], eye)
    evaluation = THEOREMS["wu_2024_equilibria"].function(found.network, found.layers)
    assert evaluation.applies
    assert evaluation.depth.log_measured <= math.log(5e-16)


def flat(depth: int, W: torch.Tensor) -> list:
    """Layers whose attention is uniform over what a token sees."""
    return [one_head(torch.zeros_like(W), W)] * depth


@pytest.mark.parametrize(("number", "epsilon", "radius"), [(0, 1 / 7, 1), (1, 1 / 7, 1), (2, 1 / 3, 3), (3, 1 / 3, 3)])
def test_thm_1_is_its_formula_for_uniform_attention(number: int, epsilon: float, radius: int) -> None:
    """sqrt(n)/2 sqrt(sum of squared column ranges) (1 - eps^r)^floor(t/r) |W|^t, with eps and r read off the mask."""
    generator = torch.Generator().manual_seed(5)
    X = rand(generator, 7, 4)
    found = simulate(flat(7, 0.7 * orthogonal(generator, 4)), X, mask=masks(7)[number])
    evaluation = THEOREMS["wu_2024_masks"].function(found.network, found.layers)
    ranges = X.amax(0) - X.amin(0)
    start = math.log(math.sqrt(7) / 2 * float(ranges.square().sum().sqrt()))
    step = math.log(1 - epsilon**radius)
    want = [start + step * (t // radius) + t * math.log(0.7) for t in range(1, 8)]
    assert [b.log_upper for b in evaluation.layers] == pytest.approx(want, rel=1e-9)
    assert [b.log_factor for b in evaluation.layers] == pytest.approx([step / radius] * 7, rel=1e-9)
    assert evaluation.depth.log_upper == evaluation.layers[-1].log_upper
    assert evaluation.applies


@pytest.mark.parametrize(
    ("name", "number", "epsilon", "length", "sources"),
    [
        ("wu_2024_nonnegative", 0, 1 / 7, 1, 7),
        ("wu_2024_nonnegative", 1, 1 / 7, 1, 1),
        ("wu_2024_nonnegative", 2, 1 / 3, 3, 1),
        ("wu_2024_nonnegative", 3, 1 / 3, 3, 1),
        ("wu_2024_layernorm", 0, 1 / 7, 1, 7),
        ("wu_2024_layernorm", 3, 1 / 3, 6, 7),
    ],
)
def test_thm_2_and_cor_1_are_their_formula_for_uniform_attention(
    name: str, number: int, epsilon: float, length: int, sources: int
) -> None:
    """sqrt((N - 1)(1 - phi)) (1 - m eps^2r)^(floor(t/r)/2), never above sqrt N."""
    generator = torch.Generator().manual_seed(6)
    X = unit_rows(rand(generator, 7, 7).abs())
    # a rotation of the positive tokens: cosines stay, entries do not
    X = X @ orthogonal(generator, 7)
    found = simulate(flat(8, orthogonal(generator, 7)), X, mask=masks(7)[number], unit=True)
    evaluation = THEOREMS[name].function(found.network, found.layers)
    start = 0.5 * math.log(6 * (1 - float((X @ X.T).min())))
    step = math.log(1 - sources * epsilon ** (2 * length))
    want = [min(0.5 * math.log(7), start + 0.5 * step * (t // length)) for t in range(1, 9)]
    assert [b.log_upper for b in evaluation.layers] == pytest.approx(want, rel=1e-9)
    assert [b.log_factor for b in evaluation.layers] == pytest.approx([0.5 * step / length] * 8, rel=1e-9)
    apart = [math.log(float((Y - Y.mean(0)).norm())) for Y in found.stream[1:]]
    seen = [t for t, b in enumerate(evaluation.layers) if not b.at_floor]
    assert (seen == []) == (number == 0)  # equal rows leave rounding only
    assert [evaluation.layers[t].log_measured for t in seen] == pytest.approx([apart[t] for t in seen], rel=1e-9)
    assert evaluation.applies
    last = evaluation.layers[-1]
    assert evaluation.depth == replace(last, layer=None, hypotheses=())
    lost = powers_of_ten(math.log(sources * epsilon ** (2 * length)))
    assert "not negative from layer 0 on" in evaluation.sentence
    assert f"the rate is one minus {lost} per {2 * length} layers" in evaluation.sentence


def test_before_cosines_are_nonnegative_the_bound_is_root_n() -> None:
    """Two tokens at 120 degrees under causal attention: the second turns to the first by halves of the angle."""
    X = torch.tensor([[1.0, 0.0], [-0.5, math.sqrt(0.75)]], dtype=torch.float64)
    found = simulate(flat(4, torch.eye(2, dtype=torch.float64)), X, mask=masks(2)[1], unit=True)
    evaluation = THEOREMS["wu_2024_layernorm"].function(found.network, found.layers)
    assert evaluation.layers[0].log_upper == pytest.approx(0.5 * math.log(2))
    # cosine 1/2 from layer 1 on, and the diameter is infinite: no later layer is bounded by less than the start there
    assert [b.log_upper for b in evaluation.layers[1:]] == pytest.approx([0.5 * math.log(0.5)] * 3)
    again = THEOREMS["wu_2024_nonnegative"].function(found.network, found.layers)
    # cosine 1/2 from layer 1 on: sqrt(1 x 1/2), then half of log(1 - 1/4) a layer
    want = [0.5 * math.log(0.5) + 0.5 * t * math.log(0.75) for t in (1, 2, 3)]
    assert [b.log_upper for b in again.layers] == pytest.approx([0.5 * math.log(2), *want])
    assert "not negative from layer 1 on" in again.sentence


def test_attention_that_underflowed_on_an_edge_gives_no_rate() -> None:
    assert log_rate(0.0, 3) == 0.0
    assert log_rate(1.0, 2) == -math.inf
    assert log_rate(0.5, 2, sources=3, power=2) == pytest.approx(math.log(1 - 3 / 16))
    assert log_rate(0.9, 1, sources=5) == -math.inf


def alternating_trees(depth: int, tokens: int = 16) -> list[torch.Tensor]:
    """Trees of depth two: the root in one half, one bridge into the other; halves change places at every layer."""
    half = tokens // 2
    first, second = list(range(half)), list(range(half, tokens))
    found = []
    for layer in range(depth):
        own, other = (first, second) if layer % 2 == 0 else (second, first)
        root, bridge = own[-1], other[(layer // 2) % (half - 1)]
        mask = torch.eye(tokens, dtype=torch.bool)
        mask[own, root] = True
        mask[bridge, root] = True
        mask[[t for t in other if t != bridge], bridge] = True
        found.append(mask)
    return found


def test_thm_1_under_masks_that_change_between_layers() -> None:
    """Each tree has radius 2, and yet no two of them bring one token to all: the radius of the paper breaks."""
    row = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    X = torch.cat((row.expand(8, 8), -row.expand(8, 8)))
    found = simulate(flat(8, torch.eye(8, dtype=torch.float64)), X, mask=alternating_trees(8))
    evaluation = THEOREMS["wu_2024_masks"].function(found.network, found.layers)
    start = math.sqrt(16) / 2 * float((X.amax(0) - X.amin(0)).norm())
    assert found.layers[-1].passage.stream_out.mu > 2.8 * start * (1 - 0.5**2) ** 4
    assert evaluation.applies, evaluation.failed
    assert evaluation.violated == ()
    assert violations(evaluation) == []


def test_cor_1_under_masks_that_change_between_layers() -> None:
    first = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    second = torch.tensor([1.0, 1.0, -1.0, -1.0] * 2, dtype=torch.float64) + 0.02 * first
    X = unit_rows(torch.cat((first.expand(8, 8), second.expand(8, 8))))
    found = simulate(flat(60, torch.eye(8, dtype=torch.float64)), X, mask=alternating_trees(60), unit=True)
    evaluation = THEOREMS["wu_2024_nonnegative"].function(found.network, found.layers)
    assert evaluation.applies, evaluation.failed
    assert violations(evaluation) == []
    old = 0.5 * math.log(15 * (1 - float((X @ X.T).min()))) + 0.5 * 30 * log_rate(0.5, 2, power=2)
    assert math.log(found.layers[-1].passage.stream_out.unit_mu) > old


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["wu_2024_masks", "wu_2024_nonnegative", "wu_2024_layernorm"])
def test_random_masks_that_change_between_layers(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    shrinks = 0
    for _ in range(100):
        n, depth = pick(generator, 3, 7), pick(generator, 3, 8)
        changing = [
            (torch.rand(n, n, generator=generator) < 0.4)
            | torch.eye(n, dtype=torch.bool)
            | torch.eye(n).roll(1, 0).bool()
            for _ in range(depth)
        ]
        weights = [one_head(0.3 * rand(generator, n, n), orthogonal(generator, n)) for _ in range(depth)]
        unit = name != "wu_2024_masks"
        X = unit_rows(rand(generator, n, n).abs()) if unit else rand(generator, n, n)
        found = simulate(weights, X, mask=changing, unit=unit)
        evaluation = THEOREMS[name].function(found.network, found.layers)
        assert [h for h in evaluation.failed if "norm at most 1" not in h] == []
        assert violations(evaluation) == []
        shrinks += evaluation.layers[-1].log_factor < 0
    assert shrinks > 50


def test_under_one_mask_a_window_is_as_long_as_the_radius_and_the_diameter() -> None:
    for mask in masks(7)[:4]:
        layers = simulate(flat(14, torch.eye(2, dtype=torch.float64)), rand(torch.Generator(), 7, 2), mask=mask).layers
        seen = [layer.passage for layer in layers]
        farthest = shortest_path(mask.T.contiguous().double().numpy(), unweighted=True).max(
            axis=1
        )  # of what each token is seen by
        assert {w.length for w in windows(seen)} == {farthest.min()}
        assert {w.sources for w in windows(seen)} == {(farthest == farthest.min()).sum()}
        everyone = {w.length for w in windows(seen, all_sources=True)}
        assert everyone == ({farthest.max()} if math.isfinite(farthest.max()) else set())


def test_a_bias_breaks_the_theorems_on_the_sphere_and_is_a_hypothesis() -> None:
    """Close tokens, and an output bias that takes off what they share: they fall apart, whatever the cosines were."""
    generator = torch.Generator().manual_seed(8)
    X = unit_rows(torch.eye(4, dtype=torch.float64)[:1] + 0.05 * rand(generator, 4, 4))
    heads = flat(1, torch.eye(4, dtype=torch.float64))[0]
    biased = replace(heads, b_O=-0.9 * X.mean(0))
    found = simulate([biased], X, mask=masks(4)[1], unit=True)
    for name in ("wu_2024_nonnegative", "wu_2024_layernorm"):
        evaluation = THEOREMS[name].function(found.network, found.layers)
        assert "no value or output bias" in evaluation.failed
        assert evaluation.layers[0].is_violated
        assert evaluation.violated == ()


def test_tokens_that_differ_by_less_than_a_cosine_shows_still_have_a_start() -> None:
    """At 1e-10 apart all cosines are 1 to rounding, and a bound from 1 - cosine would be zero."""
    generator = torch.Generator().manual_seed(9)
    X = unit_rows(torch.eye(4, dtype=torch.float64)[:1] + 1e-10 * rand(generator, 4, 4))
    found = simulate(flat(3, torch.eye(4, dtype=torch.float64)), X, mask=masks(4)[1], unit=True)
    evaluation = THEOREMS["wu_2024_nonnegative"].function(found.network, found.layers)
    assert not evaluation.layers[0].at_floor
    assert evaluation.applies, evaluation.failed
    assert violations(evaluation) == []


def test_a_block_that_does_more_than_scale_its_tokens_is_noticed_on_its_output() -> None:
    """A norm that takes off the mean over features, claimed to be scaling to unit length only."""
    generator = torch.Generator().manual_seed(10)
    X = unit_rows(rand(generator, 4, 4).abs())
    heads = flat(1, torch.eye(4, dtype=torch.float64))
    found = simulate(heads, X, mlp=lambda Y: Y - Y.mean(-1, keepdim=True), unit=True)
    network = replace(found.network, row_scaling=True)
    evaluation = THEOREMS["wu_2024_nonnegative"].function(network, found.layers)
    assert evaluation.failed == ("the block is attention and scaling to unit length",)
