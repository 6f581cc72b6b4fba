"""Each rule against torch itself: at scale one against plain float64, at e^-5000 against forward-mode derivatives.

At that scale nothing of second order is left, so that the deviation of an operation is its derivative times the
deviation of its argument, which torch computes by rules of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp

from rankscope.exact_arithmetic.rules.choices import where
from rankscope.exact_arithmetic.rules.norms import rms_norm
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.exact_arithmetic.terms import Term

Function = Callable[[Tensor], Tensor]
DEEP = -5000.0
MATRIX = torch.linspace(-1.0, 2.0, 30, dtype=torch.float64).reshape(6, 5).sin()
SQUARE = torch.linspace(0.5, 3.0, 16, dtype=torch.float64).reshape(4, 4).cos()
KERNEL = torch.linspace(-2.0, 1.0, 36, dtype=torch.float64).reshape(2, 6, 3).sin()
ONES = torch.ones(2, dtype=torch.float64)
ROWS = torch.tensor([[0, 2], [1, 1], [5, 3], [4, 0]])
POSITIONS = torch.arange(4, dtype=torch.float64)[:, None]

EVERYWHERE: dict[str, Function] = {
    "hardtanh": F.hardtanh,
    "relu6": lambda x: F.relu6(4 * x),
    "selu": F.selu,
    "clamp between tensors": lambda x: x.clamp(torch.tensor(-0.5).double(), torch.tensor(0.5).double()),
    "clamp below a tensor": lambda x: x.clamp(max=torch.tensor(0.25).double()),
    "clamp_min": lambda x: x.clamp_min(-0.25),
    "clamp_max": lambda x: x.clamp_max(0.25),
    "larger of two": lambda x: torch.max(x, x.flip(-1)),
    "smaller of two": lambda x: torch.min(x, x.flip(-1)),
    "a bound as first operand": lambda x: torch.maximum(torch.full((6,), 0.1).double(), x),
    "sum of all": torch.sum,
    "mean of all": torch.mean,
    "sum over tokens": lambda x: x.sum(0),
    "sum over both axes, kept": lambda x: x.sum((0, 1), keepdim=True),
    "mean over width, kept": lambda x: x.mean(-1, keepdim=True),
    "variance": lambda x: x.var(-1),
    "variance over tokens of a row map": lambda x: (x * POSITIONS).var(0),
    "standard deviation": lambda x: x.std(-1, keepdim=True),
    "standard deviation, biased": lambda x: x.std(-1, correction=0),
    "length": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "unit length": lambda x: F.normalize(x, dim=-1),
    "running sum": lambda x: x.cumsum(-1),
    "square": torch.square,
    "first power": lambda x: x**1,
    "fourth power": lambda x: x**4,
    "fifth power": lambda x: x**5,
    "whole negative power": lambda x: x**-1,
    "two to the power": lambda x: 2.0**x,
    "x + 2 a b": lambda x: torch.addcmul(x, x, x.flip(-1), value=2.0),
    "x + a b, plain factors": lambda x: torch.addcmul(x, SQUARE[:, :1], torch.ones(6).double(), value=-0.5),
    "difference with a factor": lambda x: torch.sub(x, x.flip(-1), alpha=3.0),
    "number minus x": lambda x: 1.5 - x,
    "plain minus x": lambda x: torch.rsub(x, torch.arange(6).double(), alpha=2),
    "plain sum with a factor": lambda x: torch.add(torch.arange(6).double(), x, alpha=-2),
    "plain divided": lambda x: torch.arange(6).double() / (x.square() + 1),
    "divided by plain": lambda x: x / torch.arange(1, 7).double(),
    "layer norm without weights": lambda x: F.layer_norm(x, (6,)),
    "group of products": lambda x: torch.baddbmm(SQUARE[None, :, :1], x[None], MATRIX[None], beta=0.5, alpha=2.0),
    "product and rows": lambda x: torch.addmm(MATRIX[:1], x, MATRIX, beta=-1.0, alpha=3.0),
    "product alone": lambda x: torch.addmm(MATRIX[:1], x, MATRIX, beta=0),
    "x beside a plain product": lambda x: torch.addmm(x, SQUARE, x.new_ones(4, 6), beta=0.5, alpha=3.0),
    "tokens mixed": lambda x: SQUARE @ x,
    "tokens mixed by equal shares": lambda x: torch.full((4, 4), 0.25).double().expand(4, 4) @ x,
    "tokens mixed, with positions": lambda x: SQUARE @ (x * POSITIONS),
    "positions through a matrix": lambda x: (x + POSITIONS) @ MATRIX,
    "one channel through a matrix": lambda x: (x[:, :1] + POSITIONS) @ MATRIX[:1],
    "equal columns": lambda x: x[:, :1].expand(4, 6) @ MATRIX,
    "convolution": lambda x: F.conv1d(x.t()[None], KERNEL, ONES),
    "convolution, padded": lambda x: F.conv1d(x.t()[None], KERNEL, ONES, padding=1),
    "convolution, dilated": lambda x: F.conv1d(torch.cat((x, x)).t()[None], KERNEL, dilation=3),
    "convolution, transposed": lambda x: F.conv_transpose1d(x.t()[None], KERNEL.transpose(0, 1).contiguous(), ONES),
    "largest entries": lambda x: x.topk(2).values,
    "smallest entries": lambda x: x.topk(3, largest=False).values,
    "entries by index": lambda x: x.gather(1, ROWS),
    "entries of other rows": lambda x: (x * POSITIONS).gather(0, ROWS % 4),
    "entries written": lambda x: x.scatter(1, ROWS[:, :1], 5.0),
    "entries written from a tensor": lambda x: x.scatter(1, ROWS[:, :1], x[:, 3:4]),
    "entries added": lambda x: x.scatter_add(1, ROWS, 2 * x[:, :2]),
    "rows added": lambda x: x.index_add(0, torch.tensor([3, 0]), x[:2], alpha=-2.0),
    "rows returned": lambda x: torch.zeros_like(x).index_add(0, torch.tensor([2, 2, 0]), x[:3]),
    "rows written": lambda x: x.index_put((torch.tensor([1, 3]),), x[:2]),
    "rows accumulated": lambda x: x.index_put((torch.tensor([1, 1]),), x[:2], accumulate=True),
    "a slice written": lambda x: x.slice_scatter(x[:2] * 2, 0, 1, 3),
    "chosen by its own sign": lambda x: torch.where(x > 0, 3 * x, x * x),
    "chosen by a mask of rows": lambda x: torch.where(POSITIONS > 1, x, 7.0),
    "masked, rows apart": lambda x: x.masked_fill(POSITIONS == 2, -4.0),
    "masked, rows alike": lambda x: x.masked_fill(torch.arange(6) == 2, -4.0),
    "ones beside": lambda x: x * torch.ones_like(x) + torch.full_like(x, 2.5),
    "ones of another shape": lambda x: x.new_ones(4, 4) @ x,
    "zeros of another shape": lambda x: torch.cat((x.new_zeros(4, 2), x), -1),
    "set to zero": lambda x: x + x.clone().zero_(),
    "every entry, rolled": lambda x: x.roll(1),
    "every entry, repeated": lambda x: x.repeat_interleave(2),
    "rows, repeated by counts": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2, 1]), dim=0),
    "turned by complex numbers": lambda x: torch.view_as_real(
        torch.view_as_complex(x.reshape(4, 3, 2)) * torch.polar(torch.ones(4, 3).double(), POSITIONS / 2)
    ),
}
POSITIVE: dict[str, Function] = {
    "log1p": torch.log1p,
    "power of a tensor": lambda x: torch.pow(x, torch.linspace(0.5, 2.0, 6).double()),
    "power of itself": lambda x: torch.pow(x, x.flip(-1)),
    "negative half": lambda x: x**-0.5,
}


def deviation(seed: int, log_scale: float, *, positive: bool = False) -> Deviation:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(1, 6, dtype=torch.float64, generator=generator)
    values = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    return Deviation(base.abs() + 1 if positive else base, (Term(log_scale, 0.1 * values),))


def point(x: Tensor) -> Tensor:
    """The value without what deviates."""
    assert isinstance(x, Deviation)
    return Deviation(x.base, [term for term in x.terms if term.log_scale > DEEP / 2], x.shape).to_plain()


def slope(x: Tensor) -> Tensor:
    """The deviation in units of ``e^-5000``."""
    assert isinstance(x, Deviation)
    small = [Term(term.log_scale - DEEP, term.values) for term in x.terms if term.log_scale <= DEEP / 2]
    return Deviation(torch.zeros((), dtype=torch.float64), small, x.shape).to_plain()


def close(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape
    assert float((one - other).abs().max()) <= 1e-12 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("name", [*EVERYWHERE, *POSITIVE])
@pytest.mark.parametrize("seed", range(2))
def test_a_rule_is_the_function_and_its_derivative(name: str, seed: int) -> None:
    function = (EVERYWHERE | POSITIVE)[name]
    x = deviation(seed, 0.0, positive=name in POSITIVE)
    out = function(x)
    close(out.to_plain() if isinstance(out, Deviation) else out, function(x.to_plain()))
    x = deviation(seed, DEEP, positive=name in POSITIVE)
    value, derivative = jvp(function, (x.base.expand(x.shape).clone(),), (x.terms[0].values,))
    out = function(x)
    assert isinstance(out, Deviation)
    close(point(out), value)
    close(slope(out), derivative)


READ: dict[str, Function] = {
    "largest of a row": lambda x: x.max(-1).values,
    "smallest of a row": lambda x: x.min(-1).values,
    "place of the largest": lambda x: x.argmax(-1),
    "comparison with a number": lambda x: x > 0.25,
    "comparison of two": lambda x: x.flip(-1) <= x,
    "a count": lambda x: x.new_zeros(3, dtype=torch.int64),
    "a cast to whole numbers": lambda x: (10 * x).long(),
}


@pytest.mark.parametrize("name", READ)
def test_what_only_decides_is_plain(name: str) -> None:
    x = deviation(0, 0.0)
    out = READ[name](x)
    assert not isinstance(out, Deviation)
    assert torch.equal(out, READ[name](x.to_plain()))


@pytest.mark.parametrize("log_scale", [0.0, DEEP])
def test_a_softmax_sums_to_one_whatever_is_done_to_it_evenly(log_scale: float) -> None:
    probs = deviation(1, log_scale).softmax(-1)
    for out, total in (
        (probs, 1.0),
        (probs * 3.0, 3.0),
        (probs / 4.0, 0.25),
        (probs + probs, 2.0),
        (torch.sub(probs, probs, alpha=0.5), 0.5),
    ):
        summed = out.sum(-1)
        assert isinstance(summed, Deviation)
        assert not summed.terms
        assert summed.to_plain().tolist() == [total] * 4
    assert (probs + 1.0).sum(-1).to_plain().tolist() == pytest.approx([7.0] * 4, rel=1e-15)
    assert (probs * torch.arange(6).double()).sum(-1).terms
    assert probs.sum(0).terms
    close((probs * POSITIONS).sum(-1).to_plain(), POSITIONS[:, 0])


def test_probabilities_leave_the_common_part_of_the_values_alone() -> None:
    probs = deviation(1, DEEP).softmax(-1)
    values = Deviation(MATRIX[:1], (Term(2 * DEEP, MATRIX),))
    out = probs @ values
    assert torch.equal(out.base, MATRIX[:1])
    assert {term.log_scale for term in out.terms} <= {2 * DEEP, 3 * DEEP}
    turned = values.t() @ probs.t()
    assert torch.equal(turned.base, MATRIX[:1].t())
    assert {term.log_scale for term in turned.terms} <= {2 * DEEP, 3 * DEEP}


def test_rms_norm_of_its_own_kernel() -> None:
    weight = torch.linspace(0.5, 2.0, 6).double()

    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, (6,), weight, None)

    x = deviation(0, DEEP)
    value, derivative = jvp(norm, (x.base.expand(x.shape).clone(),), (x.terms[0].values,))
    out, _ = rms_norm(x, (6,), weight, None)
    close(out.base.expand(out.shape), value)
    close(slope(out), derivative)


def test_a_condition_may_deviate_itself() -> None:
    x = deviation(0, DEEP)
    chosen = where(Deviation(torch.tensor([[1.0, 0.0, 0.0, 2.0, 0.0, 1.0]]).double(), (), (4, 6)), x, 7.0)
    assert chosen.base.tolist() == [[v if i in (0, 3, 5) else 7.0 for i, v in enumerate(x.base[0].tolist())]]
    assert torch.equal(slope(chosen)[:, [1, 2, 4]], torch.zeros(4, 3).double())


def test_a_deviation_that_crosses_a_kink_of_its_own() -> None:
    base = torch.tensor([[2.0**-30, 1.0]]).double()
    x = Deviation(base, (Term(-20.0, torch.tensor([[1.0, 1.0], [-2.0, 1.0]]).double()),))
    out = torch.where(x > 0, x, 0.5 * x)
    assert out.base.shape == (1, 2)
    close(out.to_plain(), torch.where(x.to_plain() > 0, x.to_plain(), 0.5 * x.to_plain()))


def test_entries_that_all_rows_choose_alike_keep_a_base_of_one_row() -> None:
    x = deviation(0, DEEP)
    alike = torch.tensor([4, 0, 2]).expand(4, 3)
    assert torch.equal(x.gather(1, alike).base, x.base[:, [4, 0, 2]])
    assert x.gather(1, ROWS).base.shape == (4, 2)
    assert x.topk(2).values.base.shape == (1, 2)


def grouped(x: Tensor, ends: Sequence[int]) -> Deviation:
    from rankscope.exact_arithmetic.rules import products

    return products.grouped_product(x, torch.stack((MATRIX, 2 * MATRIX)), offs=torch.tensor(ends, dtype=torch.int32))


@pytest.mark.parametrize("ends", [(1, 3), (0, 2), (2, 4), (0, 0)])
def test_rows_sent_to_no_expert_come_back_as_zeros(ends: tuple[int, int]) -> None:
    for x in (deviation(0, DEEP), deviation(0, DEEP) + POSITIONS):
        out = grouped(x, ends)
        factor = torch.tensor([[1.0 if i < ends[0] else 2.0 if i < ends[1] else 0.0] for i in range(4)]).double()
        close(point(out), point(x) @ MATRIX * factor)
        close(slope(out), slope(x) @ MATRIX * factor)
