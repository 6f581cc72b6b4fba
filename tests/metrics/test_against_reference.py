"""Each metric against its definition in 60-digit arithmetic (tokens) or row by row (attention)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from mpmath import mp

from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS
from tests.reference import attention as slow_attention
from tests.reference import metrics as slow
from tests.reference import sides as slow_sides

SHAPES = [(9, 4), (4, 9), (6, 6)]


def gaussian(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nearly_collapsed(n: int, d: int) -> torch.Tensor:
    """Relative residual about 1e-6."""
    return gaussian(1, 1, d) + 1e-6 * gaussian(2, n, d)


CASES = {
    "generic": lambda n, d: gaussian(0, n, d),
    "offset": lambda n, d: gaussian(0, n, d) + 3 * gaussian(1, 1, d),
    "one huge token": lambda n, d: gaussian(0, n, d) * torch.tensor([1e3] + [1.0] * (n - 1)).unsqueeze(1),
    "one huge channel": lambda n, d: gaussian(0, n, d) + torch.eye(d, dtype=torch.float64)[0] * 1e4,
    "one huge token, the others nearly equal": lambda n, d: torch.cat(
        [1e8 * gaussian(5, 1, d), nearly_collapsed(n - 1, d)]
    ),
    "nearly collapsed": nearly_collapsed,
    "nearly collapsed, tiny": lambda n, d: 1e-100 * nearly_collapsed(n, d),
    "twice the same token": lambda n, d: gaussian(0, n, d)[[0, 0, *range(2, n)]],
}


def test_every_metric_has_a_reference_or_a_test_of_its_own() -> None:
    here = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    compared = set(slow.REFERENCE) | set(slow_attention.REFERENCE) | set(slow_sides.REFERENCE)
    assert set(METRICS) - compared <= here, "a closed form in tests/metrics/test_NAME.py"
    assert compared <= set(METRICS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens(case: str, shape: tuple[int, int]) -> None:
    x = CASES[case](*shape)
    view = Tokens(x)
    wrong = {}
    with mp.workdps(slow.DIGITS):
        rows = slow.exact_rows(x)
        for name, define in slow.REFERENCE.items():
            got, want = METRICS[name].function(view).item(), define(rows)
            # A ratio of singular values is known to the rounding of the largest, a signed sum to that of its terms.
            signed = METRICS[name].range[0] < 0
            size = max(abs(want), 1) if METRICS[name].floors_itself or signed else abs(want)
            same = math.isnan(got) if mp.isnan(want) else abs(got - want) <= 1e-12 * size
            if not same:
                wrong[name] = (got, float(want))
    assert wrong == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_narrow_input_loses_nothing_it_holds(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = CASES["offset"](*shape).to(dtype)
    with mp.workdps(slow.DIGITS):
        rows = slow.exact_rows(x)
        for name, define in slow.REFERENCE.items():
            assert METRICS[name].function(x).item() == pytest.approx(float(define(rows)), rel=1e-10), name


def causal(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def left_padded(n: int) -> torch.Tensor:
    return causal(n) & (torch.arange(n) >= 2)


@pytest.mark.parametrize("name", slow_attention.REFERENCE)
@pytest.mark.parametrize("mask", [causal, left_padded, lambda n: torch.ones(n, n, dtype=torch.bool)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("row_mass", [1.0, 0.6])
def test_attention(name: str, mask, dtype: torch.dtype, row_mass: float) -> None:
    n = 7
    support = mask(n)
    scores = (3 * gaussian(3, 2, 4, n, n)).masked_fill(~support, -torch.inf)
    P = (row_mass * torch.softmax(scores, -1).nan_to_num(0.0)).to(dtype)
    keep = torch.ones(2, n, dtype=torch.bool)
    keep[:, :2] = bool(support[:2, :2].any())
    keep[1, 5:] = False
    got = METRICS[name].function(AttentionMatrix(P, support, keep))
    for b in range(2):
        for h in range(4):
            want = slow_attention.REFERENCE[name](P[b, h].double().numpy(), support.numpy(), keep[b].numpy())
            assert got[b, h].item() == pytest.approx(want, rel=1e-12)
