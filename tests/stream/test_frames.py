"""Following a stream by the tensor objects it is: what hands it on, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope.errors import SiteError
from rankscope.models.inputs import Batch
from rankscope.models.stream import Stream
from rankscope.models.view import BlockCall, BlockPlan, Stack
from rankscope.stream.frames import (
    ByTensor,
    StreamFrame,
    first_tensor,
    output_tensor,
    stream_in,
    stream_out,
    tensors_in,
    with_output_tensor,
)
from rankscope.stream.mode import ActiveBlock

T = Tensor
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
GAIN = nn.Parameter(torch.ones(8))


def passed(func: Callable[..., Any], *args: Any, normed: bool = False) -> str:
    """What the result of a call counts as, where the first argument that is ``X`` is the stream or a norm of it."""
    frame = StreamFrame(torch.zeros(2, 5, 8) if normed else X)
    if normed:
        frame.follow_normed(X)
    out = func(*args)
    frame.pass_on(func, args, out)
    if not frame.is_stream(out):
        return "lost"
    return "normed" if frame.is_normed(out) else "stream"


KEPT: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "another shape": (T.view, (X, 10, 8)),
    "a cast": (T.double, (X,)),
    "dropout": (F.dropout, (X, 0.0)),
    "the whole, sliced": (T.__getitem__, (X, (slice(None), slice(0, 5)))),
    "the whole, one slice": (T.__getitem__, (X, slice(0, 2))),
    "a number as gain": (T.mul, (X, 0.5)),
    "a number from the left": (T.__rmul__, (X, 2)),
}
LOST: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a part": (T.__getitem__, (X, (slice(None), slice(0, 4)))),
    "rows picked": (T.__getitem__, (X, torch.tensor([1, 0]))),
    "more of the same": (T.expand, (X[None], 3, 2, 5, 8)),
    "a square": (T.mul, (X, X)),
    "a computed gain": (T.mul, (X, torch.ones(8))),
    "another tensor": (T.double, (X.clone(),)),
    "no tensor": (T.__getitem__, (X, (0, 0, 0))),
    "a function of its own": (torch.tanh, (X,)),
}


@pytest.mark.parametrize("name", KEPT)
def test_values_that_stay_are_followed(name: str) -> None:
    func, args = KEPT[name]
    assert passed(func, *args) == "stream"
    assert passed(func, *args, normed=True) == "normed"


@pytest.mark.parametrize("name", LOST)
def test_values_that_change_are_not(name: str) -> None:
    func, args = LOST[name]
    assert passed(func, *args) == passed(func, *args, normed=True) == "lost"


def test_a_parameter_scales_the_stream_and_not_a_norm_of_it() -> None:
    assert passed(torch.mul, GAIN, X) == passed(torch.mul, X, GAIN) == "stream"
    assert passed(torch.mul, GAIN, X, normed=True) == "lost"
    assert passed(F.layer_norm, X, (8,)) == passed(F.layer_norm, X, (8,), normed=True) == "normed"
    assert passed(lambda: (X,)) == "lost"


def test_an_add_is_onto_the_stream_with_a_branch_of_its_shape() -> None:
    frame, branch = StreamFrame(X), torch.zeros(2, 5, 8)
    for args in ((X, branch), (branch, X)):
        found = frame.match(torch.add, args, {})
        assert found is not None
        assert found.carried is X
        assert found.branches == (branch,)
        assert found.summands() == (X, branch)
    scaled = frame.match(torch.add, (X, branch + 1), {"alpha": 2})
    assert scaled is not None
    assert torch.equal(scaled.summands()[1], torch.full((2, 5, 8), 2.0))
    for args, kwargs in (
        ((branch, branch), {}),
        ((X, X), {}),
        ((X, 1.0), {}),
        ((X, torch.zeros(8)), {}),
        ((X,), {}),
    ):
        assert frame.match(torch.add, args, kwargs) is None
    assert frame.match(torch.add, (X, branch), {"out": branch}) is not None


def test_an_object_at_the_place_of_one_that_is_gone_is_not_the_stream() -> None:
    frame = StreamFrame(X)
    held = torch.zeros(2, 5, 8)
    frame.follow(held)
    frame._aliases._held[id(GAIN)] = frame._aliases._held.pop(id(held))
    assert not frame.is_stream(GAIN)
    numbers = ByTensor[int]()
    numbers[held] = 1
    numbers._held[id(GAIN)] = numbers._held[id(held)]
    assert (numbers.get(held), numbers.get(GAIN)) == (1, None)
    assert held in numbers
    assert GAIN not in numbers


@dataclass
class _Made:
    ids: Tensor
    hidden: Tensor


def test_which_slot_is_the_stream() -> None:
    other = X + 1
    assert stream_out(Stream(slot=1), (X, other)) is other
    assert stream_out(Stream(slot="hidden"), {"read": X, "hidden": other}) is other
    assert stream_out(Stream(slot="hidden"), _Made(X, other)) is other
    assert torch.equal(stream_out(Stream(slot="sum"), (X, None, other)), X + other)
    assert stream_out(Stream(slot=2), (X, other)) is stream_out(Stream(slot="sum"), X) is None
    assert stream_in(Stream(slot=1), (X, other), {}) is stream_in(Stream(slot=1), (other,), {"mask": None}) is other
    assert stream_in(Stream(slot="hidden"), (X,), {"hidden": other}) is other
    assert torch.equal(stream_in(Stream(slot="sum"), (X,), {"residual": other}), X + other)
    assert stream_in(Stream(slot="sum"), (X, None), {}) is X


def test_a_batch_that_is_not_in_the_stream_is_refused() -> None:
    stack = Stack(None, (BlockCall("layers.0", 0, (BlockPlan((), ()),)),), Stream("tokens batch dim"), None)

    class Opens(nn.Module):
        def forward(self, x: Tensor) -> ActiveBlock:
            return ActiveBlock(x, stack, 0)

    assert Batch({}, None, 0, 5, (X,)).run(Opens()).batch_and_tokens() == (5, 2)
    with pytest.raises(SiteError, match=r"Block 0 \(layers.0\) took a tensor of shape \(2, 5, 8\).* hold 4 sequences"):
        Batch({}, None, 0, 4, (X,)).run(Opens())


def test_which_tensor_is_the_stream() -> None:
    whole, rows, row = torch.zeros(2, 5, dtype=torch.long), torch.zeros(5, 8), torch.zeros(8)
    assert first_tensor((whole, row, "text"), {"mask": None, "hidden": rows}) is rows
    assert first_tensor((whole,), {"mask": row}) is None
    for output in (rows, (whole, rows), [rows, X], {"ids": whole, "hidden": rows}, _Made(whole, rows)):
        assert output_tensor(output) is rows
    assert output_tensor((whole,)) is output_tensor("text") is None
    assert with_output_tensor(rows, X) is X
    assert with_output_tensor((whole, rows, rows), X) == (whole, X, X)
    assert with_output_tensor([rows, 3], X) == [X, 3]
    assert with_output_tensor({"ids": whole, "hidden": rows}, X) == {"ids": whole, "hidden": X}
    with pytest.raises(SiteError, match="A _Made came out where a tensor or a tuple"):
        with_output_tensor(_Made(whole, rows), X)
    assert [t is rows for t in tensors_in((1, rows, {"a": rows, "b": [rows]}))] == [True, True]
    assert tensors_in("text") == []


def test_a_call_checks_off_what_the_probe_saw() -> None:
    plan = BlockPlan(adds=("attention", "mlp"), attention=("attention",), joins=(False, True))
    stack = Stack(
        "encoder", (BlockCall("layers.0", 3, (plan, plan), final_norm_inside=True),), Stream("tokens batch dim"), None
    )
    call = ActiveBlock(X, stack, 0)
    assert call.batch_and_tokens() == (5, 2)
    assert call.canonical(X.reshape(10, 8)).shape == (5, 2, 8)
    assert (call.layer, call.is_joined, call.adds_are_over) == (3, False, False)
    assert [call.next_add() for _ in range(2)] == [(0, "attention"), (0, "mlp")]
    assert (call.joins, call.is_joined, call.adds_are_over, call.is_at_final_norm) == (True, False, True, False)
    assert str(call.next_attention()) == "encoder block 3 attention.probs"
    with pytest.raises(SiteError, match="2 of 4 adds"):
        call.check_complete(attention=True)
    assert [call.next_add() for _ in range(2)] == [(1, "attention"), (1, "mlp")]
    assert call.is_at_final_norm
    call.check_complete(attention=False)
    with pytest.raises(SiteError, match="1 of 2 attention calls"):
        call.check_complete(attention=True)
    assert str(call.next_attention()) == "encoder block 4 attention.probs"
    call.check_complete(attention=True)
    with pytest.raises(SiteError, match=r"block 3 \(layers.0\) the tracer saw more adds"):
        call.next_add()
    with pytest.raises(SiteError, match="more attention calls"):
        call.next_attention()
