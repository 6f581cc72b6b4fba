from __future__ import annotations

import math

import pytest
import torch

from rankscope._types import Status
from rankscope.errors import InputError, UnknownNameError
from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS, evaluate

STATUS = list(Status)


def specs(*names: str) -> list:
    return [METRICS[name] for name in names]


def test_shapes_and_order() -> None:
    x = torch.randn(2, 3, 5, 4)
    reading = evaluate(specs("stable_rank", "mu"), Tokens(x), 1e-7)
    assert reading.values.shape == reading.statuses.shape == (2, 2, 3)
    torch.testing.assert_close(reading.values[1], METRICS["mu"].function(x), rtol=0, atol=0)
    assert (reading.statuses == STATUS.index(Status.OK)).all()
    heads = evaluate(specs("attention_entropy"), AttentionMatrix(torch.softmax(torch.randn(2, 6, 5, 5), -1)), 1e-7)
    assert heads.values.shape == (1, 2, 6)


def test_rows_that_are_not_distributions_have_no_entropy() -> None:
    """Attention that is mixed with other matrices keeps its mass and has negative entries; the other head is sound."""
    attention = torch.softmax(torch.randn(1, 2, 5, 5, generator=torch.Generator().manual_seed(0)), -1)
    attention[0, 0, 3, 1] = -0.1
    reading = evaluate(specs("attention_entropy"), AttentionMatrix(attention), 1e-7)
    assert [STATUS[code] for code in reading.statuses.flatten().tolist()] == [Status.UNDEFINED, Status.OK]
    assert 0.0 < reading.values[0, 0, 1] < 1.0


def test_below_the_floor_values_are_kept_and_marked() -> None:
    floor = float_floor(torch.float32)
    x = torch.ones(1, 8, 4, dtype=torch.float64) + 1e-8 * torch.randn(1, 8, 4, dtype=torch.float64)
    names = ("relative_residual", "centred_stable_rank", "stable_rank", "least_singular_value")
    reading = evaluate(specs(*names), Tokens(x), floor)
    assert [STATUS[code] for code in reading.statuses.flatten().tolist()] == [
        Status.FLOOR,
        Status.FLOOR,
        Status.OK,
        Status.FLOOR,
    ]
    assert torch.isfinite(reading.values).all()


def test_a_centred_singular_value_drowns_relative_to_the_tokens() -> None:
    """1e-5 of the largest of CX, itself 1e-3 of X: below the float32 floor of X."""
    deviation = torch.zeros(1, 4, 2, dtype=torch.float64)
    deviation[0, :, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    deviation[0, :, 1] = torch.tensor([1e-5, 1e-5, -1e-5, -1e-5])
    spec = specs("centred_least_singular_value")
    for offset, status in ((0.0, Status.OK), (1e3, Status.FLOOR)):
        reading = evaluate(spec, Tokens(deviation + offset), float_floor(torch.float32))
        assert STATUS[int(reading.statuses)] is status


def test_a_value_beyond_float64_is_not_finite() -> None:
    x = torch.tensor([[[1.7e308] * 4, [-1.7e308] * 4]], dtype=torch.float64)
    reading = evaluate(specs("residual", "relative_residual"), Tokens(x), 1e-15)
    assert [STATUS[code] for code in reading.statuses.flatten().tolist()] == [Status.NOT_FINITE, Status.OK]


def test_the_wrong_side_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="attention_entropy cannot be taken of tokens"):
        evaluate(specs("attention_entropy", "mu"), Tokens(torch.randn(3, 4)), 1e-7)
    with pytest.raises(InputError, match="mu cannot be taken of attention"):
        evaluate(specs("mu"), AttentionMatrix(torch.rand(2, 4, 4)), 1e-7)


def test_an_unknown_name_brings_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="'stable_rank'"):
        METRICS["stabel_rank"]


@pytest.mark.parametrize("name", [name for name in METRICS if METRICS[name].side == "tokens"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_called_by_itself_a_metric_makes_no_number_of_what_is_none(name: str, bad: float) -> None:
    x = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    clean = METRICS[name].function(x)
    x[1, 2, 3] = bad
    got = METRICS[name].function(x)
    assert torch.isfinite(got).tolist() == [True, False, True]
    torch.testing.assert_close(got[[0, 2]], clean[[0, 2]], rtol=1e-13, atol=0)


def test_no_metric_gives_an_empty_reading() -> None:
    reading = evaluate([], Tokens(torch.randn(2, 3, 5, 4)), 1e-7)
    assert reading.values.shape == reading.statuses.shape == (0, 2, 3)
    assert (reading.values.dtype, reading.statuses.dtype) == (torch.float64, torch.int8)
    assert evaluate([], AttentionMatrix(torch.rand(2, 6, 5, 5)), 1e-7).values.shape == (0, 2, 6)


@pytest.mark.parametrize("name", ["least_singular_value", "relative_residual", "attention_rank_one_distance"])
@pytest.mark.parametrize(("factor", "status"), [(0.999, Status.OK), (1.001, Status.FLOOR)])
def test_the_floor_is_where_it_is_said_to_be(name: str, factor: float, status: Status) -> None:
    """A floor just below and just above the value itself."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    view = Tokens(x) if METRICS[name].side == "tokens" else AttentionMatrix(torch.softmax(x, -1).unsqueeze(0))
    own = METRICS[name].function(view) if METRICS[name].floors_itself else view.relative_deviation
    assert STATUS[int(evaluate(specs(name), view, factor * float(own)).statuses)] is status
