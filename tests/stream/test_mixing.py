"""The matrix by which a block mixes streams is the one it uses, for every token; or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rankscope.errors import UnsupportedConfigError
from rankscope.models.inputs import Batch
from rankscope.models.stream import Stream
from rankscope.models.view import BlockCall, BlockPlan, ModelView, Stack
from rankscope.stream.mixing import adds_only, mixing_matrices
from tests.streams_nets import DEPTH, DIM, KINDS, LAYOUTS, Network, Written, given

S = 3


def view(model: nn.Module, names: list[str], stream: Stream) -> ModelView:
    calls = tuple(BlockCall(name, layer, (BlockPlan((), ()),)) for layer, name in enumerate(names))
    return ModelView(model, (Stack(None, calls, stream, None),))


def measured(model: nn.Module, stream: Stream, names: list[str], inputs: Tensor) -> dict[int, Tensor]:
    seen = view(model, names, stream)
    return mixing_matrices(seen, seen.stacks[0], Batch({}, None, 0, len(inputs), (inputs,)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_matrix_the_block_used(kind: str, layout: str) -> None:
    model, ids = Network(kind, layout=layout), given()
    found = measured(model, Stream(layout), [f"blocks.{n}" for n in range(DEPTH)], ids)
    with torch.no_grad():
        model(ids)
    for layer, block in enumerate(model.blocks):
        assert torch.allclose(found[layer], block.used, rtol=1e-10, atol=1e-12)


def test_modules_that_write_have_a_matrix_from_the_second_block_on() -> None:
    model, ids = Written("dynamic"), given()
    stream = Stream("(batch streams) tokens dim", takes="branch")
    found = measured(model, stream, ["layers.1.1", "layers.3.1", "layers.5.1"], ids)
    with torch.no_grad():
        model(ids)
    assert sorted(found) == [1, 2]
    for block in (1, 2):
        first, second = (model.layers[2 * block + part][1].used for part in (0, 1))
        assert torch.allclose(found[block], second @ first, rtol=1e-10, atol=1e-12)


class One(nn.Module):
    """One block, given as a function of streams (batch, tokens, streams, dim)."""

    def __init__(
        self, act: Callable[[One, Tensor], Tensor], dim: int = DIM, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.wide = nn.Parameter(torch.randn(S, S)), nn.Parameter(torch.randn(dim, dim))
        self.gains = nn.Parameter(torch.randn(dim))
        self.block = _Applied(act, self)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class _Applied(nn.Module):
    def __init__(self, act: Callable[[One, Tensor], Tensor], owner: One) -> None:
        super().__init__()
        self.act, self.owner = act, [owner]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.owner[0], x)


def branch(net: One, x: Tensor) -> Tensor:
    return ((x.mean(2) @ net.wide).tanh() @ net.wide)[:, :, None].expand_as(x)


FORMS: dict[str, Callable[[One, Tensor], Tensor]] = {
    "matmul": lambda net, x: torch.matmul(net.mix, x) + branch(net, x),
    "einsum": lambda net, x: torch.einsum("kj,btjd->btkd", net.mix, x) + branch(net, x),
    "baddbmm": lambda net, x: torch.baddbmm(
        branch(net, x).flatten(0, 1), net.mix.expand(x.shape[0] * x.shape[1], -1, -1), x.flatten(0, 1)
    ).view_as(x),
    "addmm onto the streams": lambda net, x: torch.addmm(
        torch.matmul(net.mix, x).flatten(0, 2), x.flatten(0, 2), net.wide
    ).view_as(x),
    "addcmul": lambda net, x: torch.addcmul(torch.matmul(net.mix, x), branch(net, x), net.gains),
    "written out": lambda net, x: torch.stack(
        [sum(net.mix[k, j] * x[:, :, j] for j in range(S)) for k in range(S)], dim=2
    ) + branch(net, x),
    "channels taken apart and put together": lambda net, x: torch.matmul(
        net.mix, torch.cat(x.split(DIM // 2, dim=-1), dim=-1)
    ) + branch(net, x),
    "in place, through a view": lambda net, x: _in_place(net, x),
    "coefficients from the tokens": lambda net, x: torch.matmul(net.mix, x)
    * (x @ net.gains).sigmoid().mean(2)[..., None, None].detach().mul(0).add(1)
    + branch(net, x),
}  # fmt: skip


def _in_place(net: One, x: Tensor) -> Tensor:
    out = torch.matmul(net.mix, x)
    out[:, :, 1:] += branch(net, x)[:, :, 1:]
    out.mul_(1.0)
    return out


@pytest.mark.parametrize("form", FORMS)
def test_however_it_is_written(form: str) -> None:
    model, x = One(FORMS[form]), torch.randn(2, 5, S, DIM, dtype=torch.float64)
    found = measured(model, Stream("batch tokens streams dim"), ["block"], x)[0]
    assert torch.allclose(found, model.mix.detach().expand_as(found), rtol=1e-10, atol=1e-12)


REFUSED: dict[str, tuple[Callable[[One, Tensor], Tensor], str]] = {
    "a norm of all streams": (lambda net, x: nn.functional.layer_norm(torch.matmul(net.mix, x), (DIM,)), "linear"),
    "a gain per channel": (lambda net, x: torch.matmul(net.mix, x) * net.gains, "linear"),
    "a replaced stream": (
        lambda net, x: torch.cat([branch(net, x)[:, :, :1], torch.matmul(net.mix, x)[:, :, 1:]], dim=2),
        "stream 0",
    ),
    "streams of the token before": (
        lambda net, x: 0.5 * torch.matmul(net.mix, x) + 0.5 * torch.matmul(net.mix, x.roll(1, dims=1)),
        "one token to another",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    act, said = REFUSED[name]
    x = torch.randn(2, 5, S, DIM, dtype=torch.float64)
    with pytest.raises(UnsupportedConfigError, match=said):
        measured(One(act), Stream("batch tokens streams dim"), ["block"], x)


def test_too_narrow_to_tell_is_refused() -> None:
    x = torch.randn(2, 5, S, 6, dtype=torch.float64)
    with pytest.raises(UnsupportedConfigError, match="too narrow"):
        measured(One(FORMS["matmul"], dim=6), Stream("batch tokens streams dim"), ["block"], x)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_in_the_format_of_the_model(dtype: torch.dtype, atol: float) -> None:
    model, x = One(FORMS["matmul"], dtype=dtype), torch.randn(2, 5, S, DIM).to(dtype)
    found = measured(model, Stream("batch tokens streams dim"), ["block"], x)[0]
    assert torch.allclose(found, model.mix.detach().double().expand_as(found), rtol=0, atol=atol)


def test_the_model_is_left_as_it_was() -> None:
    model, ids = Network("dynamic"), given()
    with torch.no_grad():
        before = model(ids)
    measured(model, Stream(LAYOUTS[0]), [f"blocks.{n}" for n in range(DEPTH)], ids)
    with torch.no_grad():
        assert torch.equal(model(ids), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_only_the_identity_adds_and_does_nothing_else() -> None:
    x = torch.randn(2, 5, S, DIM, dtype=torch.float64)
    for act, expected in ((lambda net, x: x + branch(net, x), True), (FORMS["matmul"], False)):
        seen = view(One(act), ["block"], Stream("batch tokens streams dim"))
        assert adds_only(seen, seen.stacks[0], Batch({}, None, 0, 2, (x,))) is expected
