"""Promises that every registered metric keeps, read from what it declares about itself."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp

from rankscope._types import Status
from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import (
    DEFAULT_ATTENTION_METRICS,
    DEFAULT_TOKEN_METRICS,
    METRICS,
    NORM_METRICS,
    PAIR_METRICS,
    Invariance,
    evaluate,
)
from tests.reference.attention import REFERENCE as REFERENCE_ATTENTION
from tests.reference.metrics import REFERENCE, exact_rows

FLOOR = float_floor(torch.float64)
TOKEN = [name for name in METRICS if METRICS[name].side == "tokens"]
ATTENTION = [name for name in METRICS if METRICS[name].side == "attention"]
ABSOLUTE = {"residual", "mu", "composite_residual", "stream_rms"}
STATUS = list(Status)


def gaussian(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(seed: int, d: int) -> torch.Tensor:
    return torch.linalg.qr(gaussian(seed, d, d)).Q


@st.composite
def tokens(draw) -> torch.Tensor:
    """Gaussian tokens of any scale, with a mean or without, some nearly collapsed."""
    n, d, seed = draw(st.integers(3, 9)), draw(st.integers(2, 9)), draw(st.integers(0, 10**6))
    spread = draw(st.sampled_from([1.0, 1e-2, 1e-6]))
    x = gaussian(seed, 1, d) * draw(st.sampled_from([0.0, 1.0])) + spread * gaussian(seed + 1, n, d)
    return x * draw(st.sampled_from([1e-100, 1e-8, 1.0, 1e8]))


def agree(name: str, got: torch.Tensor, want: torch.Tensor, x: Tokens, rounding: float = 1e-12) -> bool:
    """Equal up to a relative error; what reads differences of tokens, up to the rounding of those tokens."""
    spread = float(x.relative_deviation.min())
    magnified = rounding / spread if METRICS[name].reads_deviation or spread == 0 else rounding
    size = want.abs() if name in ABSOLUTE else want.abs().clamp_min(1.0)
    return bool(((got - want).abs() <= magnified * size).all())


FACTORS = (1e-100, 3e-7, 0.7, 1e8, 1e60)
MOVES = {
    Invariance.TOKEN_ORDER: lambda x, seed: x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))],
    Invariance.CHANNEL_ORDER: lambda x, seed: x[
        :, torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))
    ],
    Invariance.ROTATION: lambda x, seed: x @ orthogonal(seed, x.shape[1]),
    Invariance.SCALE: lambda x, seed: x * FACTORS[seed % len(FACTORS)],
    Invariance.SHIFT: lambda x, seed: x + 3 * x.abs().max() * gaussian(seed, x.shape[1]),
}


@pytest.mark.parametrize("flag", MOVES)
@given(x=tokens(), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_declared_invariance_holds(flag: Invariance, x: torch.Tensor, seed: int) -> None:
    """Of every metric that declares it; they share the reductions of both sequences."""
    before, after = Tokens(x), Tokens(MOVES[flag](x, seed))
    rounded = after if flag is Invariance.SHIFT else before
    for name in (name for name in TOKEN if flag in METRICS[name].invariant_to):
        measure = METRICS[name].function
        assert agree(name, measure(after), measure(before), rounded), name


NOT_DECLARED = [(name, flag) for name in TOKEN for flag in Invariance if flag not in METRICS[name].invariant_to]


@pytest.mark.parametrize(("name", "flag"), NOT_DECLARED)
def test_an_invariance_that_is_not_declared_does_not_hold(name: str, flag: Invariance) -> None:
    x = gaussian(3, 9, 5) * torch.tensor([9.0, 4.0, 1.0, 1.0, 1.0]) + 2.0
    if name in PAIR_METRICS:  # one constant outlier channel, which hides nothing until it is rotated or outweighed
        x = gaussian(3, 9, 5)
        x[:, 0] = 1000.0
    changed = {
        Invariance.CHANNEL_ORDER: lambda: x.flip(-1),
        Invariance.ROTATION: lambda: x @ orthogonal(1, 5),
        Invariance.SCALE: lambda: 3 * x,
        Invariance.SHIFT: lambda: x + 50.0,
    }[flag]()
    measure = METRICS[name].function
    assert abs(measure(changed) - measure(x)) > 1e-6 * abs(measure(x))


@given(x=tokens())
@settings(max_examples=60, deadline=None)
def test_range(x: torch.Tensor) -> None:
    view = Tokens(x)
    for name in TOKEN:
        low, high = METRICS[name].range
        assert low - 1e-14 <= METRICS[name].function(view).item() <= high + 1e-14, name


@pytest.mark.parametrize("name", TOKEN)
def test_value_at_exact_collapse(name: str) -> None:
    spec = METRICS[name]
    for scale, n in itertools.product([1e-100, 1.0, 1e8], [2, 3, 7]):
        x = (scale * gaussian(5, 1, 6)).expand(n, 6)
        reading = evaluate([spec], Tokens(x), FLOOR)
        if spec.reads_deviation:
            assert STATUS[int(reading.statuses)] in {Status.FLOOR, Status.UNDEFINED}, (scale, n)
        if spec.at_collapse is not None:
            error = abs(spec.function(x) - spec.at_collapse).item()
            assert error <= 1e-15 * (scale if name in ABSOLUTE else 10), (scale, n)


@pytest.mark.parametrize("name", TOKEN)
def test_what_has_no_value_says_so(name: str) -> None:
    spec = METRICS[name]
    x = gaussian(0, 5, 4, 3)
    x[1] = 0.0
    x[2, 1, 1] = math.nan
    x[3, 0, 2] = math.inf
    keep = torch.ones(5, 4, dtype=torch.bool)
    keep[4] = False
    reading = evaluate([spec], Tokens(x, keep), FLOOR)
    got = [STATUS[code] for code in reading.statuses[0].tolist()]
    of_zero = Status.FLOOR if spec.reads_deviation else Status.OK
    at_zero = of_zero if name in ABSOLUTE else Status.UNDEFINED
    assert got == [Status.OK, at_zero, Status.NOT_FINITE, Status.NOT_FINITE, Status.UNDEFINED]
    assert torch.isnan(reading.values[0, 2:]).all()


@pytest.mark.parametrize("name", TOKEN)
def test_one_token_has_a_value_only_where_declared(name: str) -> None:
    spec = METRICS[name]
    reading = evaluate([spec], Tokens(gaussian(0, 1, 3)), FLOOR)
    assert STATUS[int(reading.statuses)] is (Status.OK if spec.least_count == 1 else Status.UNDEFINED)


def _sized(*sizes: float) -> torch.Tensor:
    """Gaussian tokens, each as large as asked."""
    return gaussian(11, len(sizes), 4) * torch.tensor(sizes, dtype=torch.float64)[:, None]


EXTREME = {
    "one nonzero token": _sized(0.0, 0.0, 3.0, 0.0, 0.0),
    "one nonzero token, irrational": _sized(0.0, 0.1, 0.0),
    "two nonzero tokens": _sized(0.0, 1.0, 0.0, 2.0),
    "one nonzero of two tokens": _sized(0.0, 1.0),
    "one token": _sized(1.0),
    "one zero token": _sized(0.0),
    "two tokens": _sized(1.0, 1.0),
    "two equal tokens": _sized(1.0, 1.0)[:1].expand(2, 4),
    "two opposite tokens": torch.cat([_sized(1.0), -_sized(1.0)]),
    "no tokens": _sized(),
    "all zero": _sized(0.0, 0.0, 0.0),
    "1e-170 beside 1": _sized(1.0, 1e-170, 1.0, 1e-170, 1e-170),
    "1e-160 beside 1": _sized(1e-160, 1.0, 1e-162),
    "one of size 1, others 1e-200": _sized(1e-200, 1.0, 1e-200, 1e-200),
    "denormal beside 1": _sized(1.0, 1e-310, 3e-311, 1.0),
    "1e-170 beside 1e170": _sized(1e-170, 1e170, 1e-170),
    "1e-170 beside 1e200": _sized(1e-170, 1e200, 1e-170),
    "1e12 beside 1": _sized(1.0, 1e12, 1.0, 1.0),
    "all 1e-170": _sized(1e-170, 1e-170, 1e-170),
    "all denormal": _sized(1e-310, 1e-310, 1e-310),
    "all 1e300": _sized(1e300, 1e300, 1e300),
    "all nearly the largest": _sized(1e307, 1e307, 1e307),
    "one channel": _sized(1.0, 2.0, 3.0)[:, :1],
    "one channel of 1e-170 beside 1": _sized(1.0, 1e-170, 2.0)[:, :1],
    "a direction of 1e-15": gaussian(12, 5, 4) @ torch.diag(torch.tensor([1.0, 1.0, 1.0, 1e-15]).double()),
    "a direction of 1e-12": gaussian(12, 5, 4) @ torch.diag(torch.tensor([1.0, 1.0, 1.0, 1e-12]).double()),
    "equal to 1e-14": gaussian(13, 1, 4) + 1e-14 * gaussian(14, 6, 4),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", EXTREME)
def test_at_extremes_a_value_is_right_or_marked(case: str, dtype: torch.dtype) -> None:
    """Within 1e-9 of the value or the range (float32 and least singular values: 1e-6), or marked."""
    x = EXTREME[case].to(dtype)
    if not torch.isfinite(x).all():
        return
    exact = exact_rows(x)
    for name in TOKEN:
        spec = METRICS[name]
        reading = evaluate([spec], Tokens(x), float_floor(dtype))
        status, got = STATUS[int(reading.statuses)], float(reading.values)
        assert status is not Status.NOT_FINITE, f"{name}: every entry is finite, and so is what is made of them"
        if status not in {Status.OK, Status.ESTIMATE}:
            continue
        assert spec.range[0] - 1e-9 <= got <= spec.range[1] + 1e-9, name
        if name not in REFERENCE:
            continue
        with mp.workdps(700 if spec.needs == "spectrum" else 1200):
            want = REFERENCE[name](exact)
            size = abs(want) if name in ABSOLUTE or spec.floors_itself else max(1, abs(want))
            few = spec.floors_itself or dtype is torch.float32  # a float64 Gram matrix is as good as float32 input
            near = 0.25 if status is Status.ESTIMATE else 1e-6 if few else 1e-9
            assert abs(got - want) <= near * size, name


@pytest.mark.parametrize("name", TOKEN)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_batch_is_its_sequences(name: str, dtype: torch.dtype) -> None:
    x = gaussian(1, 2, 3, 7, 5).to(dtype)
    together = METRICS[name].function(x)
    assert together.shape == (2, 3)
    assert together.dtype == torch.float64
    alone = torch.stack([METRICS[name].function(s) for s in x.flatten(0, 1)]).reshape(2, 3)
    torch.testing.assert_close(together, alone, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", TOKEN)
@pytest.mark.parametrize("dim", [3, 12])
def test_a_dropped_token_was_never_there(name: str, dim: int) -> None:
    x = gaussian(2, 4, 8, dim) + 0.5
    keep = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) < 0.6
    keep[0] = True
    keep[:, :3] = True
    x[~keep] = math.nan
    got = METRICS[name].function(Tokens(x, keep))
    want = torch.stack([METRICS[name].function(s[k]) for s, k in zip(x, keep, strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", TOKEN)
@pytest.mark.parametrize("spread", [1.0, 1e-4])
def test_float32_input_is_as_good_as_its_digits(name: str, spread: float) -> None:
    x = (gaussian(7, 1, 6) + spread * gaussian(8, 9, 6)).float()
    assert agree(name, METRICS[name].function(x), METRICS[name].function(x.double()), Tokens(x), rounding=1e-9)


def probabilities(seed: int, *shape: int) -> torch.Tensor:
    return torch.softmax(2 * gaussian(seed, *shape), -1)


@pytest.mark.parametrize(
    ("name", "flag"), [(n, f) for n in ATTENTION for f in Invariance if f and f in METRICS[n].invariant_to]
)
def test_attention_invariance(name: str, flag: Invariance) -> None:
    """The same new order for queries and keys; keys alone for channel order."""
    P = probabilities(0, 2, 6, 6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    changed = P[..., order] if flag is Invariance.CHANNEL_ORDER else P[..., order, :][..., order]
    torch.testing.assert_close(METRICS[name].function(changed), METRICS[name].function(P), rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_range_and_shape(name: str) -> None:
    low, high = METRICS[name].range
    for P in (probabilities(0, 2, 3, 5, 5), torch.eye(5).expand(2, 3, 5, 5), torch.full((2, 3, 5, 5), 0.2)):
        value = METRICS[name].function(P)
        assert value.shape == (2, 3)
        assert value.dtype == torch.float64
        assert ((value >= low - 1e-15) & (value <= high + 1e-15)).all()


@pytest.mark.parametrize("name", [n for n in ATTENTION if METRICS[n].at_collapse is not None])
def test_attention_at_equal_rows(name: str) -> None:
    spec = METRICS[name]
    P = probabilities(4, 2, 1, 6).expand(2, 6, 6)
    torch.testing.assert_close(spec.function(P), torch.full((2,), spec.at_collapse).double(), rtol=0, atol=1e-15)
    reading = evaluate([spec], AttentionMatrix(P), FLOOR)
    assert {STATUS[code] for code in reading.statuses.flatten().tolist()} == {Status.FLOOR}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_that_has_no_value_says_so(name: str) -> None:
    P = probabilities(0, 3, 1, 4, 4)
    P[1, 0, 2, 2] = math.nan
    keep = torch.tensor([[True] * 4, [True] * 4, [False] * 4])
    reading = evaluate([METRICS[name]], AttentionMatrix(P, keep=keep), FLOOR)
    assert [STATUS[c] for c in reading.statuses.flatten().tolist()] == [Status.OK, Status.NOT_FINITE, Status.UNDEFINED]


EXTREME_ATTENTION = {
    "one token": torch.ones(1, 1),
    "two tokens": probabilities(5, 2, 2),
    "each sees itself": torch.eye(4),
    "all see one": torch.eye(4)[[0, 0, 0, 0]],
    "one query, many keys": probabilities(6, 1, 9),
    "many queries, one key": torch.ones(9, 1),
    "1e-300 and 1e-170 beside 1": torch.tensor([[1.0, 1e-300], [1e-170, 1.0]], dtype=torch.float64),
    "denormals": torch.tensor([[1.0, 5e-324], [1.0, 1e-310]], dtype=torch.float64),
    "equal to 1e-12": torch.full((4, 4), 0.25).double() + 1e-12 * gaussian(7, 4, 4),
    "rows of sum one half": probabilities(8, 5, 5) / 2,
    "a row of zeros": torch.cat([probabilities(9, 4, 5), torch.zeros(1, 5).double()]),
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("case", EXTREME_ATTENTION)
def test_attention_at_extremes_is_right_or_marked(case: str, name: str) -> None:
    P = EXTREME_ATTENTION[case].double()
    reading = evaluate([METRICS[name]], AttentionMatrix(P[None]), FLOOR)
    status, got = STATUS[int(reading.statuses)], float(reading.values)
    assert status is not Status.NOT_FINITE
    if status is Status.OK and name in REFERENCE_ATTENTION:
        every = np.ones(P.shape, dtype=bool)
        want = REFERENCE_ATTENTION[name](P.numpy(), every, every[:, 0])
        assert got == pytest.approx(want, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", list(METRICS))
def test_facts_are_complete(name: str) -> None:
    spec = METRICS[name]
    assert spec.name == name
    assert spec.cites
    assert spec.symbol
    assert spec.summary.endswith(".")
    assert spec.range[0] < spec.range[1]
    text = spec.function.__doc__ or ""
    assert "**Exact" in text or "**Bound" in text
    assert "Example:" in text
    assert "ndefined" in text


def test_selections_name_registered_metrics_of_their_side() -> None:
    assert {METRICS[n].side for n in DEFAULT_TOKEN_METRICS} == {"tokens"}
    assert {METRICS[n].needs for n in NORM_METRICS} == {"norms"}
    assert {METRICS[n].side for n in DEFAULT_ATTENTION_METRICS} == {"attention"}
