"""Whole models in exact arithmetic, composed with surgery, and left as they were."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rankscope import Surgery
from rankscope.errors import UnsupportedArithmeticError
from rankscope.exact_arithmetic.running import exact_stream
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.models.inputs import Batch, prepare_inputs
from rankscope.models.loading import load
from rankscope.models.view import ModelView
from rankscope.stream.discovery import discover
from rankscope.stream.viewing import view_of
from rankscope.surgery.operating import operate
from tests.exact_arithmetic.plain import assert_agree, exact_residuals, plain_residuals, stronger
from tests.own_models import GPT, InlineGPT, ids

SITES = ("block.in", "block.out", "attention.out", "attention.sum", "mlp.out", "mlp.sum")
LOG10 = math.log(10)


def own(build: Callable[[], nn.Module], *inputs: Tensor, axis: int = 0) -> tuple[ModelView, Batch]:
    torch.manual_seed(0)
    model = stronger(build().eval(), 2.0)
    batch = Batch({}, None, 0, inputs[0].shape[axis], inputs, axis)
    return discover(model, lambda: model(*inputs), batch=batch.sequences), batch


def encoder(norm_first: bool, batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=norm_first, batch_first=batch_first, activation="gelu")
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


OWN: dict[str, Callable[[], tuple[ModelView, Batch]]] = {
    **{f"GPT, {kind}": (lambda kind=kind: own(lambda: GPT(kind), ids())) for kind in ("pre", "post", "parallel")},
    "GPT, in place": lambda: own(lambda: GPT("inplace"), ids()),
    "GPT, complete mask": lambda: own(lambda: GPT("post", causal=False), ids()),
    "blocks inline": lambda: own(InlineGPT, torch.randn(2, 11, 32)),
    "encoder, pre-norm": lambda: own(lambda: encoder(True, True), torch.randn(2, 11, 32)),
    "encoder, post-norm": lambda: own(lambda: encoder(False, True), torch.randn(2, 11, 32)),
    "encoder, tokens first": lambda: own(lambda: encoder(False, False), torch.randn(11, 2, 32), axis=1),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("skip", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("name", OWN)
def test_models_of_nobodys_library(name: str, skip: float) -> None:
    view, batch = OWN[name]()
    batch.run(view.model)
    with operate(view.model, Surgery(skip=skip), inputs=batch.arguments[0]) if skip != 1.0 else torch.no_grad():
        exact = exact_residuals(view, batch)
        assert assert_agree(exact, plain_residuals(view, batch)) >= len(exact) // 2


@pytest.mark.parametrize("name", ["encoder, pre-norm", "encoder, tokens first", "GPT, complete mask"])
def test_multi_head_attention_of_torch_is_of_third_order(name: str) -> None:
    view, batch = OWN[name]()
    with operate(view.model, Surgery(skip=0.0), inputs=batch.arguments[0]):
        deep, deeper = (exact_residuals(view, batch, log_shrink=shrink) for shrink in (-60.0, -4060.0))
    orders = [(deep[place] - deeper[place]) / 4000.0 for place in deep if place[0] == 0]
    assert orders == pytest.approx([3.0**layer for layer in range(len(orders))], rel=1e-9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "surgery",
    [
        {"skip": 0.0, "mlp": "drop"},
        {"skip": 0.5},
        {"norm": "identity"},
        {"norm": "rms"},
        {"norm": "scale", "skip": 0.0},
        {"mask": "causal"},
        {"mask": "window(2)", "skip": 0.0},
        {"temperature": 0.5},
        {"attention": "uniform"},
        {"attention": "centred"},
        {"attention_scale": 3.0, "skip": 0.0},
        {"heads": [1, 3], "skip": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_under_surgery(surgery: dict[str, object], attention: str) -> None:
    loaded = load("init:tiny-bert")
    loaded.model.set_attn_implementation(attention)
    stronger(loaded.model)
    batch = prepare_inputs(loaded, None, sequences=2, tokens=12, batch=2)[0]
    view = view_of(loaded.model, batch)
    with operate(loaded.model, Surgery(**surgery)):  # type: ignore[arg-type]
        exact = exact_residuals(view, batch, SITES)
        assert_agree(exact, plain_residuals(view, batch, SITES))


def test_fused_and_spelled_out_attention_agree_far_below_float64() -> None:
    found = []
    for attention in ("sdpa", "eager"):
        loaded = load("init:tiny-bert")
        loaded.model.set_attn_implementation(attention)
        batch = prepare_inputs(loaded, ["one two three four five", "six seven eight"], tokens=12, batch=2)[0]
        view = view_of(loaded.model, batch)
        with operate(loaded.model, Surgery(skip=0.0)):
            found.append(exact_residuals(view, batch))
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert min(found[0].values()) < -25 * LOG10


def test_padding_does_not_enter() -> None:
    loaded = load("init:tiny-bert")
    padded = prepare_inputs(loaded, ["a b c d e f g h", "i j k"], tokens=12, batch=2)[0]
    alone = prepare_inputs(loaded, ["i j k"], tokens=12, batch=1)[0]
    assert padded.keep is not None
    assert not bool(padded.keep[1].all())
    with operate(loaded.model, Surgery(skip=0.0)):
        both = exact_residuals(view_of(loaded.model, padded), padded)
        one = exact_residuals(view_of(loaded.model, alone), alone)
    assert [both[1, ref] for _, ref in one] == pytest.approx(list(one.values()), rel=1e-9)


def test_causal_attention_alone_halves_the_residual() -> None:
    class Values(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64)).Q)

        def forward(self, x: Tensor) -> Tensor:
            v = (x @ self.turn).unsqueeze(1)
            return nn.functional.scaled_dot_product_attention(v, v, v, is_causal=True).squeeze(1)

    x = Deviation.from_tokens(torch.randn(1, 6, 16))
    residuals = []
    for _ in range(60):
        x = Values()(x.recentred())
        residuals.append(x.log_residual())
    assert math.exp(residuals[-1] - residuals[-2]) == pytest.approx(0.5, rel=1e-6)


def test_uniform_attention_collapses_at_once() -> None:
    loaded = load("init:tiny-bert")
    batch = prepare_inputs(loaded, None, sequences=1, tokens=8, batch=1)[0]
    view = view_of(loaded.model, batch)
    with operate(loaded.model, Surgery(skip=0.0, attention="uniform")):
        found = exact_residuals(view, batch, ["block.out"])
    assert set(found.values()) == {-math.inf}


def test_the_model_is_left_as_it_was() -> None:
    loaded = load("init:tiny-llama")
    batch = prepare_inputs(loaded, None, sequences=2, tokens=8, batch=2)[0]
    view = view_of(loaded.model, batch)
    before = {name: (value.data_ptr(), value.clone()) for name, value in loaded.model.state_dict().items()}
    buffers = {name: value.dtype for name, value in loaded.model.named_buffers()}
    with torch.no_grad():
        logits = batch.run(loaded.model).last_hidden_state
    exact_stream(view, batch, lambda *seen: None)
    after = loaded.model.state_dict()
    assert {name: value.data_ptr() for name, value in after.items()} == {name: p for name, (p, _) in before.items()}
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())
    assert {name: value.dtype for name, value in loaded.model.named_buffers()} == buffers
    with torch.no_grad():
        assert torch.equal(batch.run(loaded.model).last_hidden_state, logits)


def test_an_observer_that_raises_leaves_the_model_too() -> None:
    loaded = load("init:tiny-gpt2")
    batch = prepare_inputs(loaded, None, sequences=1, tokens=8, batch=1)[0]
    view = view_of(loaded.model, batch)

    def fail(*seen: object) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        exact_stream(view, batch, fail)
    assert next(loaded.model.parameters()).dtype == torch.float32
    assert not loaded.model.h[0]._forward_pre_hooks


def test_a_block_that_loses_the_deviation_is_refused() -> None:
    view, batch = own(lambda: GPT("pre"), ids())
    block = view.model.blocks[1]
    forward = block.forward
    block.forward = lambda x: forward(x).to_plain() if isinstance(x, Deviation) else forward(x)
    with pytest.raises(UnsupportedArithmeticError, match="deviation lost"):
        exact_residuals(view, batch)
