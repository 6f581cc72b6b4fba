"""The mean field against published tables, Monte Carlo, and networks with real random weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rankscope.ext.theory.mean_field import kernel_of, mean_field, moments
from rankscope.ext.theory.predict.sampled_design import follow
from rankscope.models.design import Design
from tests.ext.theory.published import critical_beta, mean_cosine, next_cosine

BERT = Design(depth=12, width=768, heads=12, initial_cosine=1 / 3)


def test_residual_scaling_table() -> None:
    """n = 32, L = 50: 1.0000 with whole branches, .0502 with branches over sqrt(L)."""
    assert f"{mean_cosine(50, 32, 1.0, 1.0):.4f}" == "1.0000"
    assert f"{mean_cosine(50, 32, 1 / 50, 1 / 50):.4f}" == "0.0502"


def test_residual_scaling_is_that_of_a_network() -> None:
    """Mean over 200 networks with uniform attention, linear MLP, width 64, 6 blocks, against the ratio of means."""
    generator = torch.Generator().manual_seed(0)
    n, d, blocks, a = 8, 64, 6, 0.6
    C = N = 0.0
    for _ in range(200):
        x = torch.randn(n, d, dtype=torch.float64, generator=generator)
        for _ in range(blocks):
            W, V = (torch.randn(d, d, dtype=torch.float64, generator=generator) / d**0.5 for _ in range(2))
            x = x + a * x.mean(0) @ W
            x = x + a * x @ V
        C, N = C + float(x.sum(0).square().sum()), N + float(x.square().sum())
    rho = (C - N) / ((n - 1) * N)
    assert rho == pytest.approx(mean_cosine(blocks, n, a * a, a * a), abs=0.02)


def test_mean_field_is_the_published_mean_cosine_for_linear_networks() -> None:
    """Uniform attention, linear MLPs, no norms: the closed form of Noci et al."""
    design = Design(
        depth=9,
        width=24,
        heads=3,
        head_dim=5,
        mlp="linear",
        mlp_width=7,
        norm="none",
        norm_place="none",
        attention_scale=0.7,
        mlp_scale=1.3,
        query_std=1e-6,
        key_std=1e-6,
        value_std=0.3,
        output_std=0.2,
        mlp_in_std=0.25,
        mlp_out_std=0.15,
        initial_cosine=0.2,
    )
    n = 6
    attention = 0.7**2 * (0.3**2 * 24) * (0.2**2 * 15)
    through = 1.3**2 * (0.25**2 * 24) * (0.15**2 * 7)
    cosines = [1 - m.D / m.q for m in moments(design, n, 9)]
    assert cosines == pytest.approx([mean_cosine(L, n, attention, through, 0.2) for L in range(10)], rel=1e-9)


@pytest.mark.parametrize(
    ("beta", "table"),
    [
        (0.5, {5: 0.4067, 10: 0.6409, 20: 0.9201, 30: 0.9864, 50: 0.9996}),
        (3.0, {5: 0.3111, 10: 0.4493, 20: 0.7713, 30: 0.9555, 50: 0.9988}),
    ],
)
def test_post_norm_table(beta: float, table: dict[int, float]) -> None:
    rho = 0.2
    for depth in range(1, 51):
        rho = next_cosine(rho, beta, value=0.2, weight=0.2, out_weight=0.2, bias=4e-4)
        if depth in table:
            assert f"{rho:.4f}" == f"{table[depth]:.4f}"


def test_attention_freezes_above_the_critical_temperature() -> None:
    """Largest share of softmax over many Gaussian scores of standard deviation beta sqrt(log T)."""
    assert critical_beta(0.0) == pytest.approx(math.sqrt(2))
    rng, T = np.random.default_rng(0), 200_000
    largest = []
    for beta in (0.7, 3.0):
        scores = beta * math.sqrt(math.log(T)) * rng.standard_normal((20, T))
        shares = np.exp(scores - scores.max(1, keepdims=True))
        largest.append(float((shares.max(1) / shares.sum(1)).mean()))
    assert largest[0] < 0.02
    assert largest[1] > 0.3


@pytest.mark.parametrize("mlp", ["gelu", "gelu_new", "silu", "relu", "swiglu", "geglu", "linear"])
@pytest.mark.parametrize("delta", [0.7, 1e-3, 1e-11])
def test_kernels_are_expectations(mlp: str, delta: float) -> None:
    """Against two million Gaussian pairs, or the derivative for a tiny difference."""
    rng, v = np.random.default_rng(0), 0.8
    a, b, c, d = (rng.standard_normal(1_000_000) for _ in range(4))
    gated = {"swiglu": "silu", "geglu": "gelu"}
    own = gated.get(mlp, mlp)
    act = {
        "gelu": torch.nn.functional.gelu,
        "gelu_new": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "silu": torch.nn.functional.silu,
        "relu": torch.relu,
        "linear": lambda x: x,
    }[own]

    def phi(x: np.ndarray) -> np.ndarray:
        return act(torch.from_numpy(x)).numpy()

    s, t = math.sqrt(v * (1 - delta / 2)), math.sqrt(v * delta / 2)
    first, second = phi(s * a + t * b), phi(s * a - t * b)
    if mlp in gated:
        first, second = first * (s * c + t * d), second * (s * c - t * d)
    square, apart = kernel_of(mlp, v, delta)
    assert square == pytest.approx((first**2).mean(), rel=0.01)
    assert apart == pytest.approx(0.5 * ((first - second) ** 2).mean(), rel=0.02)


def test_mean_field_is_the_published_recursion_for_relu() -> None:
    """With scores flat and many tokens, both recursions are one."""
    design = BERT.changed(mlp="relu", tokens=4096, width=8192, weight_std=0.006, query_key_std=1e-5)
    ours = mean_field(design, 4096, 30)
    variances = {
        "value": design.value_gain,
        "weight": design.mlp_in_std**2 * design.width,
        "out_weight": design.mlp_out_std**2 * design.mlp_width,
    }
    cosines = [design.initial_cosine]
    for _ in range(30):
        cosines.append(next_cosine(cosines[-1], 0.0, **variances))
    theirs = [0.5 * math.log10((1 - cosine) * 4095 / 4096) for cosine in cosines]
    assert ours.log10_relative == pytest.approx(theirs, abs=1e-3)


def test_mean_field_has_order_three_without_skips() -> None:
    found = moments(BERT.changed(skip_gain=0.0), 32, 4)
    logs = [math.log(m.D / m.q) for m in found]
    assert (logs[4] - logs[3]) / (logs[3] - logs[2]) == pytest.approx(3, abs=1e-3)
    assert (logs[3] - logs[2]) / (logs[2] - logs[1]) == pytest.approx(3, abs=0.1)


BROKEN = BERT.changed(mask="causal", norm="none", norm_place="none")


def test_it_says_what_it_assumes_and_when_it_does_not_hold() -> None:
    answer = mean_field(BROKEN, 64, 8)
    assert not answer.applies
    assert answer.log10_relative == ()
    assert any(not one.holds for one in answer.assumptions)


def test_scores_of_normed_queries_and_keys_have_unit_variance() -> None:
    """sqrt(d) cos of two independent directions has variance 1, exactly."""
    generator = torch.Generator().manual_seed(0)
    for width in (4, 64):
        pair = torch.randn(2, 100_000, width, dtype=torch.float64, generator=generator)
        scores = math.sqrt(width) * torch.cosine_similarity(pair[0], pair[1], dim=-1)
        # four standard errors; the fourth moment is 3 d / (d + 2)
        spread = math.sqrt((3 * width / (width + 2) - 1) / 100_000)
        assert abs(float(scores.square().mean()) - 1) < 4 * spread


def test_mean_field_of_normed_branches_is_that_of_sampled_networks() -> None:
    """Every branch adds mean square 1: the stream grows by 2 per block, tokens as in ten samples, to 5%."""
    design = Design(depth=8, width=256, heads=4, tokens=16, norm_place="pre", branch_norm=True)
    assert [m.q for m in moments(design, 16, 8)] == pytest.approx([1 + 2 * block for block in range(9)])
    answer = mean_field(design, 16, 8)
    sampled = np.mean([follow(design, seed, 8).log10_relative for seed in range(10)], axis=0)
    assert answer.applies
    assert sampled == pytest.approx(answer.log10_relative, abs=math.log10(1.05))
    bare = mean_field(design.changed(branch_norm=False), 16, 8)
    assert abs(bare.log10_relative[-1] - answer.log10_relative[-1]) > math.log10(1.2), "the norm changes nothing here"
