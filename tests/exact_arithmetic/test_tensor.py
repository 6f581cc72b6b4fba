"""The tensor itself: where the mean goes, what padding does, views and writing in place."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankscope.errors import InputError, UnsupportedArithmeticError
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.exact_arithmetic.terms import Term, gathered


def tiny(shape: tuple[int, ...] = (1, 5, 6), log_scale: float = -5000.0) -> Deviation:
    base = torch.randn(*(1,) * (len(shape) - 1), shape[-1], dtype=torch.float64)
    return Deviation(base, (Term(log_scale, torch.randn(*shape, dtype=torch.float64)),))


def values(x: Tensor) -> Tensor:
    """The deviations in units of ``e^-5000``."""
    assert isinstance(x, Deviation)
    (term,) = x.terms
    return term.values.expand(x.shape) * math.exp(term.log_scale + 5000.0)


def test_tokens_are_split_into_mean_and_rest() -> None:
    x = torch.tensor([[[1.0, 2.0], [3.0, 2.0], [9.0, 9.0]]])
    keep = torch.tensor([[True, True, False]])
    out = Deviation.from_tokens(x, keep)
    assert out.base.tolist() == [[[2.0, 2.0]]]
    assert torch.equal(out.to_plain(), x.double())
    assert math.exp(out.log_residual(keep)) == pytest.approx(math.sqrt(2.0), rel=1e-15)
    assert math.exp(out.log_norm(keep)) == pytest.approx(math.sqrt(18.0), rel=1e-15)
    assert math.exp(out.log_residual()) > 5


def test_equal_tokens_have_no_residual() -> None:
    assert Deviation.from_tokens(torch.ones(1, 3, 4)).log_residual() == -math.inf
    assert Deviation.from_tokens(torch.zeros(1, 3, 4)).log_norm() == -math.inf


def test_what_is_not_finite_is_said() -> None:
    x = torch.ones(1, 3, 4)
    x[0, 1, 2] = math.nan
    assert math.isnan(Deviation.from_tokens(x).log_residual())


def test_no_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="expected"):
        Deviation.from_tokens(torch.tensor([1, 2]))


@given(st.floats(-1e6, 0.0), st.floats(-3.0, 3.0))
def test_recentring_keeps_the_value(log_scale: float, common: float) -> None:
    x = tiny(log_scale=log_scale)
    moved = Deviation(x.base, (Term(log_scale, x.terms[0].values + common),)).recentred()
    assert moved.terms[0].values.mean(dim=1).abs().max() < 1e-15
    assert moved.log_residual() == pytest.approx(x.log_residual(), abs=1e-12 * max(1.0, abs(log_scale)))


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.view(5, 6),
        lambda x: x.view(1, 5, 2, 3).transpose(1, 2),
        lambda x: x.reshape(-1),
        lambda x: x.permute(2, 0, 1),
        lambda x: x.unsqueeze(1).expand(1, 3, 5, 6),
        lambda x: x.unsqueeze(1).expand(1, 3, 5, 6).reshape(3, 5, 6),
        lambda x: x.repeat_interleave(2, dim=-1),
        lambda x: x.repeat(2, 1, 3),
        lambda x: x[:, 1:4, ::2],
        lambda x: x[:, [3, 0]],
        lambda x: x[..., 2],
        lambda x: x.chunk(2, dim=-1)[1],
        lambda x: x.split([1, 4], dim=1)[1],
        lambda x: torch.cat((x, x.flip(-1)), dim=1),
        lambda x: torch.stack((x, x), dim=2),
        lambda x: x.roll(2, 1),
        lambda x: x.squeeze(0).t(),
        lambda x: x.gather(-1, torch.tensor([[[0, 3]] * 5])),
        lambda x: x.index_select(1, torch.tensor([4, 4, 0])),
        lambda x: x.clone().contiguous(),
        lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
        lambda x: torch.nn.functional.pad(x, (0, 2)),
        lambda x: x.unbind(1)[2],
    ],
)
def test_moving_values_moves_every_part_alike(move: Callable[[Tensor], Tensor]) -> None:
    x = tiny()
    out = move(x)
    assert isinstance(out, Deviation)
    assert torch.equal(out.base.expand(out.shape), move(x.base.expand(x.shape)))
    assert torch.equal(values(out), move(x.terms[0].values))


def test_casts_to_narrow_formats_change_nothing() -> None:
    x = tiny()
    out = x.float().to(torch.float16).type(torch.bfloat16)
    assert out.dtype == torch.float64
    assert torch.equal(values(out), values(x))
    assert x.bool().dtype == torch.bool


def test_writing_into_a_slice_writes_into_the_whole() -> None:
    x, y = tiny(), tiny((1, 5, 2))
    whole = x.clone()
    whole[..., :2] = y
    assert torch.equal(values(whole)[..., :2], values(y))
    assert torch.equal(values(whole)[..., 2:], values(x)[..., 2:])
    whole[:, 1:3] += x[:, 1:3]
    assert torch.allclose(values(whole)[:, 1:3, 2:], 2 * values(x)[:, 1:3, 2:], rtol=1e-15)


def test_writing_through_a_view_reaches_the_whole() -> None:
    x = tiny()
    whole = x.clone()
    whole.view(5, 6).transpose(0, 1).mul_(2.0)
    assert torch.equal(values(whole), 2 * values(x))


def test_a_deviation_is_not_written_into_a_plain_tensor() -> None:
    with pytest.raises(UnsupportedArithmeticError, match="into a plain tensor"):
        torch.zeros(1, 5, 6, dtype=torch.float64).add_(tiny())


def test_a_mask_that_is_the_same_for_every_row_leaves_rows_equal() -> None:
    x = tiny() + torch.tensor([[0.0, 1.0, 0.0, 0.0, 2.0, 0.0]]).expand(5, 6).clone()
    assert x.base.shape == (1, 1, 6)
    assert (x + torch.arange(5.0)[:, None]).terms[-1].values.shape == (1, 5, 1)


def test_small_terms_are_not_swamped() -> None:
    row, full = Term(-10.0, torch.ones(4, 1)), Term(-500.0, torch.ones(4, 4))
    assert len(gathered((row, full))) == 2
    assert len(gathered((Term(-600.0, torch.ones(4, 1)), full))) == 1


def test_rounding_in_the_common_part_is_refused() -> None:
    base = torch.ones(1, 4, 3, dtype=torch.float64)
    base[0, 2, 1] += 2.0**-50
    x = Deviation(base, (Term(-5000.0, torch.randn(1, 4, 3, dtype=torch.float64)),))
    with pytest.raises(UnsupportedArithmeticError, match="rounding"):
        x.log_residual()
    base[0, 2, 1] += 1.0
    assert x.log_residual() == pytest.approx(math.log(math.sqrt(0.75)), abs=1e-12)


def test_a_function_that_is_not_linear_of_scores_without_positions_is_refused() -> None:
    x = tiny().unsqueeze(1)
    scores = x @ x.transpose(-1, -2)
    assert len(scores.terms) == 2
    with pytest.raises(UnsupportedArithmeticError, match="before their softmax"):
        torch.tanh(scores)
