"""The two-sided cubic bounds against attention in many digits, and where a hypothesis is dropped."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from mpmath import mp

from rankscope.ext.theory.operator_norms import product_norm
from rankscope.linalg.attention_weights import AttentionWeights, float64_heads, head_tensors
from rankscope.linalg.cubic_law import cubic_interval, leading_term, remainder_constants
from tests.ext.theory.networks import Layer, random_layer, random_tokens
from tests.reference import cubic as reference

LOG10 = math.log(10)


def global_cubic_bound(weights: AttentionWeights) -> float:
    r"""Log of :math:`\frac12\sum_h s\|A_h\|_2\|W_h\|_2`, the constant of the theorem's last bound."""
    heads = float64_heads(weights)
    score = abs(heads.scale) * product_norm(heads.W_Q, heads.W_K)
    return float(((score * product_norm(heads.W_V, heads.W_O.transpose(-1, -2))).sum() / 2).log())


def drawn(rng: np.random.Generator) -> tuple[Layer, np.ndarray, np.ndarray]:
    n, dim, heads, d_qk, d_v = (int(rng.integers(low, high)) for low, high in ((2, 6), (1, 5), (1, 4), (1, 4), (1, 4)))
    return random_layer(rng, dim, heads, d_qk, d_v), *random_tokens(rng, n, dim)


def exact_log_residual(layer: Layer, x: np.ndarray, R: np.ndarray, exponent: int) -> mp.mpf:
    return reference.log_norm(
        reference.residual(reference.attention(reference.tokens(x, R, exponent), layer.heads, layer.scale))
    )


@pytest.mark.slow
def test_bounds_hold_on_1000_random_networks(record_property: Callable[[str, object], None]) -> None:
    """Residuals from 10 to 10^-60 before the layer, so down to 10^-180 after it; the slack is kept by scale."""
    rng = np.random.default_rng(0)
    slack: dict[int, list[float]] = {}
    bare_above = 0
    with mp.workdps(230):
        for _ in range(1000):
            layer, x, R = drawn(rng)
            exponent = int(rng.choice([1, 0, -1, -2, -3, -4, -8, -20, -60]))
            exact = exact_log_residual(layer, x, R, exponent)
            found = cubic_interval(torch.from_numpy(R), layer.tensors, torch.from_numpy(x), exponent * LOG10)
            low, high = float(found.log_lower_bound), float(found.log_upper_bound)
            assert low <= exact <= high, (exponent, low, exact, high)
            assert exact <= global_cubic_bound(layer.tensors) + 3 * exponent * LOG10 + 1e-12
            slack.setdefault(exponent, []).append(float(exact) - low)
            bare_above += float(found.log_leading) > exact + 1e-9
    assert bare_above > 100, "the leading term alone was no lower bound to begin with"
    medians = {e: float(np.median(values)) for e, values in sorted(slack.items(), reverse=True)}
    record_property("median slack of the log lower bound by log10 of the residual", medians)
    for exponent, ceiling in ((-1, 1e-2), (-2, 1e-4), (-3, 1e-6)):
        assert medians[exponent] < ceiling
    assert max(slack[-8] + slack[-20] + slack[-60]) < 1e-8


def test_remainders_hold_far_from_collapse() -> None:
    """Nothing is asymptotic: K_2 and K_1 bound the differences at norms from 1e-2 to 1e2."""
    rng = np.random.default_rng(2)
    for _ in range(300):
        layer, x, R = drawn(rng)
        r = 10 ** rng.uniform(-2, 2)
        heads, D, base = layer.tensors, torch.from_numpy(R), torch.from_numpy(x)
        log_r = torch.tensor(math.log(r), dtype=torch.float64)
        X = x + r * R
        after = np.zeros_like(X)
        for head in layer.heads:
            scores = layer.scale * (X @ head["W_Q"] + head["b_Q"]) @ (X @ head["W_K"]).T
            P = np.exp(scores - scores.max(1, keepdims=True))
            after += (P / P.sum(1, keepdims=True)) @ X @ head["W_V"] @ head["W_O"]
        first, second, whole = remainder_constants(D, heads, base)
        tilted, plain = (r**3 * leading_term(D, heads, log_r, b) for b in (base, None))
        rounding = 1e-13 * max(1.0, float(np.abs(after).max()), float(tilted.norm()))
        assert np.linalg.norm(after - after.mean(0)) <= r**3 * float(whole) + rounding
        assert np.linalg.norm(after - after.mean(0) - tilted.numpy()) <= r**5 * float(second) + rounding
        assert float((tilted - plain).norm()) <= r**4 * float(first) * (1 + 1e-12) + 1e-14 * float(plain.norm())


def test_two_tokens_attain_the_global_constant_and_half_of_it_fails() -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    heads = head_tensors(one, one, one, one)
    for r in (1e-3, 0.3, 2.0):
        exact = math.log(math.sqrt(2) * r * math.tanh(r * r))
        bound = global_cubic_bound(heads) + 3 * math.log(math.sqrt(2) * r)
        assert exact <= bound
        assert (bound - exact < 1e-5) == (r == 1e-3)
    assert math.log(math.sqrt(2) * 1e-3 * math.tanh(1e-6)) > bound_at(heads, 1e-3) - math.log(2)


def bound_at(heads: object, r: float) -> float:
    return global_cubic_bound(heads) + 3 * math.log(math.sqrt(2) * r)  # type: ignore[arg-type]


@pytest.mark.parametrize("dropped", ["skip", "mask", "positions"])
def test_upper_bound_fails_without_its_hypotheses(dropped: str) -> None:
    rng = np.random.default_rng(3)
    layer = random_layer(rng, dim=3, heads=1, d_qk=3, d_v=3)
    x, R = random_tokens(rng, 4, 3)
    head, X = layer.heads[0], x + 1e-2 * R
    scores = layer.scale * (X @ head["W_Q"] + head["b_Q"]) @ (X @ head["W_K"]).T
    scores = scores + (rng.normal(size=(4, 4)) if dropped == "positions" else 0.0)
    P = np.exp(scores) * (np.tril(np.ones((4, 4))) if dropped == "mask" else 1.0)
    after = (P / P.sum(1, keepdims=True)) @ X @ head["W_V"] @ head["W_O"] + (X if dropped == "skip" else 0.0)
    exact = math.log(np.linalg.norm(after - after.mean(0)))
    assert exact > global_cubic_bound(layer.tensors) + 3 * math.log(1e-2)
