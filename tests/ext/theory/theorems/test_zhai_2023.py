"""The entropy bound on random rows, where it is attained, and where its hypothesis is dropped."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

from rankscope.ext.theory.theorems import THEOREMS
from rankscope.ext.theory.theorems.zhai_2023_entropy import log_entropy_bound
from tests.ext.theory.theorems.networks import pick, rand, random_heads, simulate, violations


def entropy(logits: torch.Tensor) -> float:
    p = torch.softmax(logits, -1)
    return float(-torch.special.xlogy(p, p).sum())


def test_zhai_thm_3_1_holds_on_random_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(500):
        logits = rand(generator, pick(generator, 2, 40)) * 10 ** float(torch.rand(1, generator=generator) * 3 - 1.5)
        size = float(torch.linalg.vector_norm(logits))
        assert log_entropy_bound(logits.numel(), size) <= math.log(entropy(logits)) + 1e-12 if entropy(logits) else True


def test_it_is_attained_by_one_logit_that_stands_out() -> None:
    n, size = 12, 3.0
    logits = torch.full((n,), -size / math.sqrt(n * (n - 1)), dtype=torch.float64)
    logits[0] = size * math.sqrt((n - 1) / n)
    assert math.exp(log_entropy_bound(n, size)) == pytest.approx(entropy(logits), rel=1e-13)


def test_it_fails_where_logits_are_larger_than_said() -> None:
    logits = torch.zeros(8, dtype=torch.float64)
    logits[0] = 6.0
    assert log_entropy_bound(8, 2.0) > math.log(entropy(logits))


@pytest.mark.parametrize("tokens", [2, 64])
@pytest.mark.parametrize("size", [0.0, 0.3, 20.0, 31.0, 500.0, 1e5])
def test_it_keeps_its_digits_where_the_exponential_underflows(tokens: int, size: float) -> None:
    with mpmath.workdps(60):
        s, T = mpmath.mpf(size), mpmath.mpf(tokens)
        b = mpmath.exp(-s * mpmath.sqrt(T / (T - 1)))
        bound = mpmath.log1p((T - 1) * b) + s * mpmath.sqrt(T * (T - 1)) * b / (1 + (T - 1) * b)
        expected = float(mpmath.log(bound))
    assert log_entropy_bound(tokens, size) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_an_entropy_that_underflowed_is_rounding_and_no_violation() -> None:
    generator = torch.Generator().manual_seed(3)
    found = simulate([random_heads(generator, 3, 2, 2, 2)], 1e4 * rand(generator, 5, 3))
    evaluation = THEOREMS["zhai_2023_entropy"].function(found.network, found.layers)
    assert evaluation.layers[0].at_floor
    assert violations(evaluation) == []


def test_zhai_thm_3_1_holds_on_random_layers() -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(100):
        dim = pick(generator, 2, 5)
        found = simulate([random_heads(generator, dim, 2, 2, 2)], 0.3 * rand(generator, pick(generator, 2, 8), dim))
        evaluation = THEOREMS["zhai_2023_entropy"].function(found.network, found.layers)
        assert evaluation.applies
        assert violations(evaluation) == []


def test_one_token_or_logits_of_no_known_size_have_no_bound() -> None:
    assert math.isnan(log_entropy_bound(1, 2.0))
    assert math.isnan(log_entropy_bound(5, math.nan))
    assert math.exp(log_entropy_bound(2, 0.0)) == pytest.approx(math.log(2), rel=1e-13)
