"""Promises of metrics of every side but tokens and attention, read from their declarations.

A new side adds an example to ``tests/reference/sides.py``; a new metric adds its definition there.
"""

from __future__ import annotations

import math

import pytest
import torch
from mpmath import mp
from torch import Tensor

from rankscope._types import Status
from rankscope.linalg.precision import float_floor
from rankscope.metrics import METRICS, SIDES, Invariance, evaluate
from rankscope.stream.sites import SITES, side_shown
from tests.reference.metrics import DIGITS, exact_rows
from tests.reference.sides import EXAMPLES, REFERENCE, gaussian

STATUS = list(Status)
OTHER = [name for name in METRICS if METRICS[name].side not in ("tokens", "attention")]
UPDATES = [name for name in OTHER if METRICS[name].side == "update"]
FLOATS = [*UPDATES, *(name for name in OTHER if METRICS[name].side == "branch")]


def example(name: str, seed: int, *batch: int) -> tuple[Tensor, ...]:
    return EXAMPLES[METRICS[name].side](seed, *batch)


def orthogonal(d: int) -> Tensor:
    return torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q


def test_every_side_has_sites_an_example_and_metrics() -> None:
    assert {side_shown(site) for site in SITES} == set(SIDES)
    assert set(EXAMPLES) == set(SIDES) - {"tokens", "attention"}
    assert {spec.side for spec in METRICS.values()} == set(SIDES)
    assert set(REFERENCE) <= set(OTHER)


def has_heads(name: str) -> bool:
    return SIDES[METRICS[name].side].has_heads


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.parametrize("seed", range(3))
def test_it_is_its_definition(name: str, seed: int) -> None:
    tensors = example(name, seed)
    got = METRICS[name].function(*tensors)
    heads = zip(*tensors, strict=True) if has_heads(name) else [tensors]
    with mp.workdps(DIGITS):
        want = [float(REFERENCE[name](*map(exact_rows, one))) for one in heads]
    assert got.flatten().tolist() == pytest.approx(want, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", OTHER)
def test_a_batch_is_its_sequences(name: str) -> None:
    tensors = example(name, 1, 2, 3)
    together = METRICS[name].function(*tensors)
    assert together.shape == ((2, 3, 2) if has_heads(name) else (2, 3))
    assert together.dtype == torch.float64
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    alone = torch.stack([METRICS[name].function(*one) for one in zip(*flat, strict=True)]).reshape(together.shape)
    torch.testing.assert_close(together, alone, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", OTHER)
def test_a_dropped_token_was_never_there(name: str) -> None:
    tensors = example(name, 2, 4)
    keep = torch.rand(4, 7, generator=torch.Generator().manual_seed(0)) < 0.6
    keep[:, :3] = True
    of = (lambda t, b: t[b][:, keep[b]]) if has_heads(name) else (lambda t, b: t[b][keep[b]])
    want = torch.stack([METRICS[name].function(*(of(t, b) for t in tensors)) for b in range(4)])
    for tensor in tensors:
        rows = tensor.transpose(1, 2) if has_heads(name) else tensor
        rows[~keep] = math.nan if tensor.is_floating_point() else 0
    got = METRICS[name].function(SIDES[METRICS[name].side].view(*tensors, keep))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", OTHER)
def test_range_and_what_has_no_value_says_so(name: str) -> None:
    spec = METRICS[name]
    tensors = example(name, 3, 4)
    tensors[0][1, ..., 2, 0] = math.nan
    tensors[0][2, ..., 1, 1] = math.inf
    keep = torch.ones(4, 7, dtype=torch.bool)
    keep[3] = False
    reading = evaluate([spec], SIDES[spec.side].view(*tensors, keep), float_floor(torch.float64))
    got = [{STATUS[code] for code in codes.flatten().tolist()} for codes in reading.statuses[0]]
    assert got == [{Status.OK}, {Status.NOT_FINITE}, {Status.NOT_FINITE}, {Status.UNDEFINED}]
    assert ((spec.range[0] <= reading.values[0, 0]) & (reading.values[0, 0] <= spec.range[1])).all()
    assert not torch.isfinite(spec.function(*tensors)[1:3]).any(), "called by itself it makes no number either"


CHANGES = {
    Invariance.TOKEN_ORDER: lambda x: x[torch.tensor([3, 0, 6, 5, 1, 4, 2])],
    Invariance.CHANNEL_ORDER: lambda x: x[:, torch.tensor([3, 0, 4, 1, 2])],
    Invariance.ROTATION: lambda x: x @ orthogonal(5),
    Invariance.SCALE: lambda x: 3 * x,
    Invariance.SHIFT: lambda x: x + 5.0,
}


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("flag", CHANGES)
def test_exactly_the_declared_invariances_hold(name: str, flag: Invariance) -> None:
    tensors = example(name, 4)
    before = METRICS[name].function(*tensors).item()
    after = METRICS[name].function(*map(CHANGES[flag], tensors)).item()
    if flag in METRICS[name].invariant_to:
        assert after == pytest.approx(before, rel=1e-12)
    else:
        assert abs(after - before) > 1e-6 * abs(before)


SIZES = {
    "tiny stream": (1e-170, 1.0),
    "tiny change": (1.0, 1e-170),
    "denormal change": (1.0, 1e-310),
    "both tiny": (1e-170, 1e-170),
    "both huge": (1e300, 1e300),
    "tiny beside huge": (1e-170, 1e170),
    "change of 1e-9": (1.0, 1e-9),
}


@pytest.mark.parametrize("name", sorted({*UPDATES} & {*REFERENCE}))
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("others", [1.0, 1e-200])
def test_an_update_of_any_size_is_right(name: str, case: str, others: float) -> None:
    """Half of the tokens have the sizes of the case, the others one size."""
    x, u = example(name, 5)
    sizes = [torch.tensor([size, others] * 3 + [size], dtype=torch.float64)[:, None] for size in SIZES[case]]
    x, u = x * sizes[0], u * sizes[1]
    with mp.workdps(700):
        want = REFERENCE[name](exact_rows(x), exact_rows(u))
        got = METRICS[name].function(x, u).item()
        if want > mp.mpf(2) ** 1024:
            assert got == math.inf
        else:
            assert abs(got - want) <= 1e-9 * max(abs(want), mp.mpf(10) ** -30)


@pytest.mark.parametrize("erased", [1 - 1e-7, 1.0 - 1e-12, 2.0])
def test_a_block_that_nearly_erases_its_input(erased: float) -> None:
    x = example("block_influence", 6)[0]
    y = x * (1 - erased) + 1e-9 * EXAMPLES["update"](9)[1]
    u = y - x
    with mp.workdps(DIGITS):
        want = float(REFERENCE["block_influence"](exact_rows(x), exact_rows(u)))
    # The inputs hold y to 16 digits of x: that many of its own are lost.
    digits = 1e-15 * float((x.norm(dim=-1) / y.norm(dim=-1)).max())
    assert METRICS["block_influence"].function(x, u).item() == pytest.approx(want, abs=10 * digits)


def test_a_router_without_probabilities_has_a_load_and_no_entropy() -> None:
    probs, chosen = EXAMPLES["router"](1)
    assert METRICS["router_entropy"].function(0 * probs, chosen).isnan()
    for name in ("effective_experts", "largest_expert_share"):
        assert METRICS[name].function(0 * probs, chosen) == METRICS[name].function(probs, chosen)
    same = torch.zeros_like(chosen)
    assert METRICS["effective_experts"].function(probs, same).item() == 1.0
    assert METRICS["largest_expert_share"].function(probs, same).item() == 1.0


def test_a_hidden_key_and_a_row_that_sees_none_are_not_scores() -> None:
    scores = torch.tensor([[[-2.0, torch.finfo(torch.float32).min], [-1e9, -1e9]]])
    assert METRICS["max_attention_logit"].function(scores).item() == -2.0
    assert METRICS["max_attention_logit"].function(scores[:, 1:]).isnan().all()


def test_zero_tokens_are_left_out_and_no_change_is_no_influence() -> None:
    x, u = EXAMPLES["update"](7)
    x[2], u[3] = 0.0, 0.0
    kept = [0, 1, 3, 4, 5, 6]
    for name in ("write_ratio", "block_influence"):
        assert METRICS[name].function(x, u).item() == METRICS[name].function(x[kept], u[kept]).item()
    moved = [0, 1, 4, 5, 6]
    assert METRICS["update_alignment"].function(x, u) == METRICS["update_alignment"].function(x[moved], u[moved])
    assert METRICS["block_influence"].function(x, 0 * u).item() == 0.0
    assert METRICS["write_ratio"].function(x, 0 * u).item() == 0.0
    assert METRICS["update_alignment"].function(x, 0 * u).isnan()


def test_what_a_branch_writes_outside_the_span_of_its_inputs() -> None:
    """A linear map into the span, a rank-one input with a nonlinear map, and inputs that span everything."""
    share = METRICS["outside_span_share"].function
    x = gaussian(1, 4, 9)
    assert share(x, gaussian(2, 4, 4) @ x).item() < 1e-28
    # x_i = c_i v with v = (1, 2, 2)/3 and y_i = c_i^2 (1, 0, 0): of each output, (1, 0, 0).v = 1/3 is inside.
    c = torch.tensor([[1.0], [-2.0], [3.0]], dtype=torch.float64)
    v, e = torch.tensor([[1.0, 2.0, 2.0]]).double() / 3, torch.tensor([[1.0, 0.0, 0.0]]).double()
    assert share(c * v, c.square() * e).item() == pytest.approx(8 / 9, rel=1e-14)
    assert share((c * v).float(), c.square() * e).item() == pytest.approx(8 / 9, rel=1e-6), "rounding is no direction"
    for tokens in (9, 12):
        reading = evaluate(
            [METRICS["outside_span_share"]],
            SIDES["branch"].view(gaussian(3, tokens, 9), gaussian(4, tokens, 9)),
            float_floor(torch.float64),
        )
        assert STATUS[int(reading.statuses)] is Status.UNDEFINED
    assert share(torch.cat([x, x, x]), gaussian(5, 12, 9)).isfinite(), "twelve tokens of rank four leave room"
    assert share(0 * x, x).isnan()
    assert share(x, 0 * x).isnan()
