"""Closed forms and inequalities that tie the metrics to the theory they cite."""

from __future__ import annotations

import doctest
import importlib
import math
import pkgutil

import pytest
import torch

import rankscope.metrics
from rankscope.linalg.attention import AttentionMatrix
from rankscope.metrics import METRICS


def take(name: str, x: torch.Tensor | AttentionMatrix) -> torch.Tensor:
    return METRICS[name].function(x)


@pytest.mark.parametrize("module", [m.name for m in pkgutil.iter_modules(rankscope.metrics.__path__)])
def test_examples_in_docstrings(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"rankscope.metrics.{module}")).failed == 0


def test_residual_is_the_least_over_all_centres() -> None:
    """The mean, the medians and the mid-ranges each win in their own norm, and nowhere need to in the others'."""
    x = torch.randn(9, 4, dtype=torch.float64)
    for _ in range(50):
        other = x - torch.randn(4, dtype=torch.float64)
        assert take("residual", x) <= other.norm()
        assert take("median_relative_residual", x) * x.abs().sum(0).max() <= other.abs().sum(0).max()
        assert take("midrange_relative_residual", x) * x.abs().max() <= other.abs().max()


def test_composite_residual_about_the_mean_can_exceed_one() -> None:
    x = torch.randn(128, 64, dtype=torch.float64)
    x[0] *= 1000
    assert 1.2 < take("relative_composite_residual", x) < 2 * (1 - 1 / 128)


def test_equicorrelated_tokens() -> None:
    """Gram matrix (1-r)I + r11^T: cosine and correlation r, eigenvalues 1+(n-1)r and 1-r."""
    n, r = 6, 0.3
    gram = (1 - r) * torch.eye(n, dtype=torch.float64) + r
    x = torch.linalg.cholesky(gram)
    top, rest = 1 + (n - 1) * r, 1 - r
    want = {
        "mean_cosine": r,
        "correlation": r,
        "relative_residual": math.sqrt((n - 1) * rest / n),
        "stable_rank": n / top,
        "participation_ratio": n**2 / (top**2 + (n - 1) * rest**2),
        "least_singular_value": math.sqrt(rest / top),
        "centred_mean_cosine": -1 / (n - 1),
        "centred_stable_rank": n - 1,
        "centred_effective_rank": n - 1,
        "centred_participation_ratio": n - 1,
        "centred_energy_rank_99": n - 1,
        "centred_least_singular_value": 1,
        "largest_token_share": 1 / n,
    }
    for name, value in want.items():
        assert take(name, x).item() == pytest.approx(value, rel=1e-12), name


def test_contraction_bounds_the_residual_after_mixing_and_is_reached() -> None:
    P = torch.softmax(3 * torch.randn(1, 8, 8, dtype=torch.float64), -1)
    factor = take("attention_contraction", P).item()
    for _ in range(20):
        x = torch.randn(8, 5, dtype=torch.float64)
        assert take("residual", P[0] @ x) <= factor * take("residual", x) * (1 + 1e-12)
    C = torch.eye(8, dtype=torch.float64) - 1 / 8
    worst = torch.linalg.svd(C @ P[0]).Vh[0].unsqueeze(1)
    assert (take("residual", P[0] @ worst) / take("residual", worst)).item() == pytest.approx(factor, rel=1e-10)


def test_causal_uniform_attention() -> None:
    n = 6
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    P = (causal.double() / causal.sum(-1, keepdim=True)).unsqueeze(0)
    view = AttentionMatrix(P, causal)
    assert take("attention_entropy", view).item() == pytest.approx(1.0, rel=1e-14)
    assert take("first_token_sink_rate", view).item() == pytest.approx(sum(1 / k for k in range(2, n + 1)) / (n - 1))
    assert take("attention_entropy", P).item() < 0.8


def test_rows_without_a_choice_alone_have_no_entropy() -> None:
    view = AttentionMatrix(torch.eye(4).unsqueeze(0), torch.eye(4, dtype=torch.bool))
    assert math.isnan(take("attention_entropy", view).item())
    assert math.isnan(take("first_token_sink_rate", view).item())
