"""Theorems 1 to 3 and corollary 1 on random networks inside and outside their hypotheses."""

from __future__ import annotations

import math

import pytest
import torch

from rankscope._errors import InputError
from rankscope.theory.theorems import THEOREMS
from rankscope.theory.theorems._decay import log_rate
from rankscope.theory.theorems.wu_2024_equilibria import attended, equilibrium, equilibrium_values
from tests.theory.theorems.networks import one_head, pick, rand, simulate, violations

INSTANCES = 500


def masks(n: int) -> list[torch.Tensor]:
    """Complete, causal, a causal window, a band, and a star."""
    full = torch.ones(n, n, dtype=torch.bool)
    band = full.tril(1) & full.triu(-1)
    star = torch.eye(n, dtype=torch.bool)
    star[:, 0] = True
    return [full, full.tril(), full.tril() & full.triu(-2), band, star]


def orthogonal(generator: torch.Generator, dim: int) -> torch.Tensor:
    return torch.linalg.qr(rand(generator, dim, dim)).Q


def test_thm_1_holds_inside_its_hypotheses() -> None:
    generator = torch.Generator().manual_seed(1)
    for number in range(INSTANCES):
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


def test_cor_1_holds_inside_its_hypotheses() -> None:
    generator = torch.Generator().manual_seed(2)
    for number in range(INSTANCES):
        n, dim = pick(generator, 2, 6), pick(generator, 2, 6)
        weights = [one_head(0.3 * rand(generator, dim, dim), orthogonal(generator, dim)) for _ in range(3)]
        X = unit_rows(rand(generator, n, dim).abs())
        found = simulate(weights, X, mask=masks(n)[number % 5], unit=True)
        evaluation = THEOREMS["wu_2024_nonnegative"].function(found.network, found.layers)
        assert evaluation.applies, evaluation.failed
        assert violations(evaluation) == []


def test_thm_2_holds_inside_its_hypotheses() -> None:
    generator = torch.Generator().manual_seed(3)
    begun = 0
    for number in range(INSTANCES):
        n = pick(generator, 2, 5)
        dim = pick(generator, n, 7)
        weights = [one_head(0.3 * rand(generator, dim, dim), orthogonal(generator, dim)) for _ in range(4)]
        mask = (masks(n)[0], masks(n)[3])[number % 2]
        found = simulate(weights, unit_rows(rand(generator, n, dim)), mask=mask, unit=True)
        evaluation = THEOREMS["wu_2024_layernorm"].function(found.network, found.layers)
        assert evaluation.applies, evaluation.failed
        assert violations(evaluation) == []
        begun += "from no layer" not in evaluation.sentence
    assert begun > 0.8 * INSTANCES


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


def test_thm_3_holds_for_random_sizes_and_weights() -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(INSTANCES):
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
