"""Theorem 2.2, corollary 2.3, claim 3.1 and corollary 3.2 on random networks inside and outside their hypotheses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rankscope.errors import InputError
from rankscope.ext.theory.lipschitz import LipschitzConstants, mlp_constants
from rankscope.ext.theory.operator_norms import composite_norm, composite_residual
from rankscope.ext.theory.theorems import THEOREMS
from rankscope.ext.theory.theorems._cubic import LARGEST_SPREAD, least_gamma
from rankscope.ext.theory.theorems.dong_2021_skip import skip_example
from tests.ext.theory.theorems.networks import (
    Simulated,
    heads_of,
    one_head,
    pick,
    rand,
    random_heads,
    simulate,
    violations,
)

INSTANCES = pytest.mark.parametrize("instances", [100, pytest.param(500, marks=pytest.mark.slow)])


def evaluate(name: str, found: Simulated):
    return THEOREMS[name].function(found.network, found.layers)


def inside(generator: torch.Generator, heads: int, depth: int, *, mlp=None, constants=None, name: str):
    """A random network, its tokens drawn together until every hypothesis holds."""
    dim, n, width = pick(generator, 2, 6), pick(generator, 2, 8), pick(generator, 1, 4)
    weights = [random_heads(generator, dim, heads, width, pick(generator, 1, 3)) for _ in range(depth)]
    x, R = rand(generator, dim), rand(generator, n, dim)
    for halvings in range(2, 30):
        module = None if mlp is None else mlp(dim)
        found = simulate(
            weights,
            x + R * 0.2**halvings,
            mlp=None if module is None else module[0],
            constants=None if module is None else module[1],
        )
        evaluation = evaluate(name, found)
        if evaluation.applies:
            return found, evaluation
    raise AssertionError(f"never inside: {evaluation.failed}")


@INSTANCES
def test_thm_2_2_holds_inside_its_hypotheses(instances: int) -> None:
    generator = torch.Generator().manual_seed(1)
    slack = []
    for _ in range(instances):
        _, evaluation = inside(generator, 1, pick(generator, 1, 3), name="dong_2021_single_head")
        assert violations(evaluation) == []
        slack += [b.log_slack for b in evaluation.layers if not b.at_floor and b.log_slack is not None]
    assert len(slack) > instances
    assert min(slack) > 0


@INSTANCES
def test_cor_2_3_holds_inside_its_hypotheses(instances: int) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(instances):
        _, evaluation = inside(generator, pick(generator, 2, 4), pick(generator, 1, 2), name="dong_2021_multi_head")
        assert violations(evaluation) == []


def test_the_composite_of_a_sum_can_exceed_h_times_the_largest_so_that_heads_are_a_hypothesis() -> None:
    """Tokens e_1 ... e_d make every other step of the proof tight up to a constant, and this one fails by sqrt d."""
    generator = torch.Generator().manual_seed(3)
    eye = torch.eye(200, dtype=torch.float64)
    tall = torch.zeros_like(eye)
    tall[:, 0] = 1.0
    assert composite_norm(tall + tall.T) > 7 * composite_norm(tall)
    both = eye.expand(2, -1, -1)
    heads = heads_of(rand(generator, 200, 200).expand(2, -1, -1), both, torch.stack((tall, tall.T)), both)
    found = simulate([heads], 1e-3 * eye)
    evaluation = evaluate("dong_2021_multi_head", found)
    assert evaluation.failed == ("heads together stay below H times the largest",)


@pytest.mark.parametrize("name", ["dong_2021_single_head", "dong_2021_multi_head"])
def test_with_a_mask_the_bound_fails(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    heads = one_head(1e-6 * rand(generator, 4, 4), rand(generator, 4, 4))
    found = simulate([heads], 0.1 * rand(generator, 6, 4), mask=torch.ones(6, 6).tril().bool())
    evaluation = evaluate(name, found)
    assert evaluation.failed == ("every row sees every token",)
    assert violations(evaluation)


def test_with_a_skip_the_bound_fails_over_depth() -> None:
    generator = torch.Generator().manual_seed(5)
    heads = [one_head(1e-3 * rand(generator, 4, 4), rand(generator, 4, 4))] * 3
    found = simulate(heads, 0.1 * rand(generator, 6, 4), skip=1.0)
    evaluation = evaluate("dong_2021_single_head", found)
    assert evaluation.failed == ("attention alone (no skip, MLP or norm)",)
    assert evaluation.depth is not None
    assert float(composite_residual(found.stream[-1])) > math.exp(evaluation.depth.log_upper)


def test_the_spread_allowed_is_the_root_of_exp_x_is_one_plus_two_x() -> None:
    assert math.exp(LARGEST_SPREAD) == pytest.approx(1 + 2 * LARGEST_SPREAD, rel=1e-15)
    assert round(LARGEST_SPREAD, 3) == 1.256


def test_gamma_is_at_most_root_n_and_the_slack_of_random_layers_is_large() -> None:
    """The notes: 307 random layers, at least 24 times."""
    generator = torch.Generator().manual_seed(6)
    least = math.inf
    for _ in range(307):
        found, evaluation = inside(generator, 1, 1, name="dong_2021_single_head")
        passage = found.layers[0].passage
        assert 0 < least_gamma(passage) <= math.sqrt(passage.tokens)
        least = min(least, evaluation.layers[0].log_slack)
    assert math.exp(least) > 4


def test_the_bound_is_vacuous_at_ordinary_initialisation_and_collapse_happens_all_the_same() -> None:
    generator = torch.Generator().manual_seed(7)
    dim, n = 64, 32
    heads = [
        one_head(
            rand(generator, dim, dim) / dim**0.5 @ rand(generator, dim, dim) / dim**0.5, rand(generator, dim, dim) / 8
        )
        for _ in range(4)
    ]
    found = simulate(heads, rand(generator, n, dim))
    evaluation = evaluate("dong_2021_single_head", found)
    first = found.layers[0].passage
    needed = evaluation.layers[0].log_factor + 2 * math.log(first.composite_in)
    assert needed > math.log(100)
    assert evaluation.depth.log_upper > 100
    assert found.layers[-1].passage.frobenius_out < 1e-3 * first.frobenius_in


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh"])
@INSTANCES
def test_cor_3_2_holds_inside_its_hypotheses(activation: str, instances: int) -> None:
    generator = torch.Generator().manual_seed(8)
    functions = {
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
        "tanh": torch.tanh,
    }
    matrices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def mlp(dim: int):
        W_in, W_out = matrices.setdefault(dim, (rand(generator, dim, 2 * dim), rand(generator, 2 * dim, dim)))
        return lambda X: functions[activation](X @ W_in) @ W_out, mlp_constants(W_in, W_out, activation)

    for _ in range(instances // 4):
        matrices.clear()
        _, evaluation = inside(generator, pick(generator, 1, 2), 2, mlp=mlp, name="dong_2021_mlp")
        assert evaluation.layers[0].log_measured is not None
        assert violations(evaluation) == []


def test_without_lambda_the_bound_fails_behind_an_mlp() -> None:
    generator = torch.Generator().manual_seed(9)
    W = 1e6 * torch.eye(4, dtype=torch.float64)
    heads = one_head(rand(generator, 4, 4), rand(generator, 4, 4))
    found = simulate([heads], 1e-2 * rand(generator, 5, 4), mlp=lambda X: X @ W)
    evaluation = evaluate("dong_2021_multi_head", found)
    assert float(composite_residual(found.stream[-1])) > math.exp(evaluation.layers[0].log_upper)


@INSTANCES
def test_claim_3_1_builds_parameters_of_any_beta_that_keep_the_residual(instances: int) -> None:
    generator = torch.Generator().manual_seed(10)
    for _ in range(instances):
        beta = 10 ** float(torch.empty(1, dtype=torch.float64).uniform_(-6, 6, generator=generator))
        example = skip_example(beta, pick(generator, 2, 12))
        assert example.beta == pytest.approx(beta, rel=1e-12)
        residuals = [float(composite_residual(X)) for X in example.layers(pick(generator, 1, 20))]
        assert residuals[-1] >= residuals[0] * (1 - 1e-13)


def test_the_same_parameters_without_the_skip_do_not_keep_it() -> None:
    example = skip_example(0.5)
    X = example.tokens
    for _ in range(3):
        scores = example.score * (X @ X.T) / X.shape[1] ** 0.5
        X = example.value * torch.softmax(scores, -1) @ X
    assert float(composite_residual(X)) < 1e-3 * float(composite_residual(example.tokens))


def test_an_example_without_beta_is_refused() -> None:
    with pytest.raises(InputError, match="beta above 0"):
        skip_example(0.0)


def grown(beta: float, depth: int, tokens: int = 8) -> list[float]:
    """Logs of what each layer multiplies the residual by: 1 + cp, p = (e - 1)/(e + n - 1), e = exp(t a^2/sqrt n)."""
    value, side, found = min(beta, 1.0), 1.0, []
    for _ in range(depth):
        e = math.exp(min(beta / value * side**2 / math.sqrt(tokens), 500.0))
        found.append(math.log1p(value * (e - 1) / (e + tokens - 1)))
        side *= math.exp(found[-1])
    return found


@pytest.mark.parametrize("factor", [0.05, 1.0, 30.0])
def test_claim_3_1_runs_an_example_of_the_beta_and_the_depth_at_hand(factor: float) -> None:
    generator = torch.Generator().manual_seed(12)
    weights = [one_head(size * rand(generator, 4, 4), factor * rand(generator, 4, 4)) for size in (0.1, 1.0, 0.3)]
    found = simulate(weights, rand(generator, 5, 4), skip=1.0)
    evaluation = evaluate("dong_2021_skip", found)
    beta = max(layer.beta for layer in found.layers)
    want = grown(beta, 3)
    assert [b.layer for b in evaluation.layers] == [0, 1, 2]
    assert [b.log_measured - b.log_lower for b in evaluation.layers] == pytest.approx(want, rel=1e-9)
    assert evaluation.layers[0].log_lower == pytest.approx(math.log(2 * (1 - 1 / 8)), rel=1e-12)
    assert evaluation.depth.log_lower == evaluation.layers[0].log_lower
    assert evaluation.depth.log_measured - evaluation.depth.log_lower == pytest.approx(sum(want), rel=1e-9)
    assert evaluation.applies
    assert f"{math.exp(sum(want)):.3g} times as large" in evaluation.sentence


def test_cor_3_2_over_the_depth_is_the_statement_when_layers_are_alike() -> None:
    """c^((3^L - 1)/2) r^(3^L), with the factor of each layer."""
    generator = torch.Generator().manual_seed(14)
    W_in, W_out = rand(generator, 3, 6), rand(generator, 6, 3)
    found = simulate(
        [random_heads(generator, 3, 2, 2, 2)] * 3,
        0.1 * rand(generator, 4, 3),
        mlp=lambda X: torch.relu(X @ W_in) @ W_out,
        constants=mlp_constants(W_in, W_out, "relu"),
    )
    evaluation = evaluate("dong_2021_mlp", found)
    first, composite = found.layers[0].passage, found.layers[0].mlp.composite
    weights = 4 * 2 * found.layers[0].scale * found.layers[0].beta * composite
    for layer, bound in zip(found.layers, evaluation.layers, strict=True):
        assert bound.log_factor == pytest.approx(math.log(weights * least_gamma(layer.passage)), rel=1e-12)
        assert bound.log_measured == math.log(layer.passage.stream_out.composite)
    alike = Simulated(found.network, tuple(replace(one, passage=first) for one in found.layers), ())
    depth = evaluate("dong_2021_mlp", alike).depth
    c = math.log(weights * least_gamma(first))
    assert depth.log_upper == pytest.approx(13 * c + 27 * math.log(first.composite_in), rel=1e-12)
    assert depth.log_measured == evaluation.layers[0].log_measured


def test_cor_3_2_without_a_constant_bounds_nothing_and_says_why() -> None:
    generator = torch.Generator().manual_seed(15)
    found = simulate([random_heads(generator, 3, 2, 2, 2)] * 2, rand(generator, 4, 3))
    layers = (found.layers[0], replace(found.layers[1], mlp_note="an activation without a known slope"))
    evaluation = evaluate("dong_2021_mlp", Simulated(found.network, layers, ()))
    assert [(b.log_upper, b.log_factor, b.log_measured) for b in evaluation.layers] == [(None, None, None)] * 2
    assert evaluation.depth is None
    assert "MLP with a certified Lipschitz constant" in evaluation.failed
    assert evaluation.sentence == "No MLP could be read: an activation without a known slope."


def test_constants_on_a_ball_do_not_certify_a_network_without_norms() -> None:
    generator = torch.Generator().manual_seed(21)
    dim = 3
    W = rand(generator, dim, dim)
    ball = LipschitzConstants(2.0, radius=1.0)
    found = simulate(
        [random_heads(generator, dim, 1, 2, 2)], rand(generator, 4, dim), mlp=lambda X: X @ W, constants=ball
    )
    evaluation = THEOREMS["dong_2021_mlp"].function(found.network, found.layers)
    assert "MLP with a certified Lipschitz constant" in evaluation.failed
