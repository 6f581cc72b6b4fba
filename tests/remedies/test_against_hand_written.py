"""Every remedy held against its formulas written out by hand: outputs and gradients, in four ways to attend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rankscope.errors import UnsupportedOperationError
from rankscope.remedies import REMEDIES, applied
from rankscope.surgery.operating import operate
from tests.loops import case, unchanged
from tests.remedies.written_out import forward_under
from tests.surgery.written_out import CARRIERS, DIM, KINDS, Model, build

# One strength per remedy at which it does something; twice the default of those that begin as nothing.
STRENGTHS = {
    "residual_scale": 0.7, "skipinit": 0.3, "stronger_skip": 1.7, "pre_norm": 1.0, "layernorm_scaling": 1.3,
    "deepnorm": 1.0, "value_skipinit": 0.4, "shaped_attention": 0.8, "centred_attention": 0.6, "attn_scale": 0.9,
    "log_n_scale": 1.2, "local_mask": 2.0, "value_residual": 0.3, "gated_attention": 1.5, "contranorm": 0.4,
    "neutreno": 0.6, "peri_ln": 0.7, "qk_norm": 1.3, "logit_softcap": 0.5, "critical_temperature": 0.8,
    "differential_attention": 0.9, "attention_out_norm": 1.4, "highway_skip": 0.5,
}  # fmt: skip
ONLY = {
    "pre_norm": ("post",), "deepnorm": ("post",), "highway_skip": ("post",), "layernorm_scaling": ("pre", "parallel"),
    "peri_ln": ("pre",),
}  # fmt: skip
NEED_VALUES = ("value_residual", "gated_attention", "neutreno", "attention_out_norm")
NEED_QUERIES = ("qk_norm", "critical_temperature", "differential_attention")
DEPTH = 3


def stream(seed: int = 3) -> Tensor:
    return torch.randn(2, 7, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_every_remedy_is_written_out() -> None:
    """All but the one for shared blocks, which the small models do not have; it has its own test below."""
    assert {*STRENGTHS, "loop_scale"} == set(REMEDIES)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("carrier", "causal"), [*((carrier, False) for carrier in CARRIERS), ("eager", True), ("sdpa", True)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_remedy_is_what_it_says(kind: str, carrier: str, causal: bool) -> None:
    model = build(kind, carrier, causal, DEPTH)
    with operate(model, inputs=stream(9)):  # to find its structure, once
        pass
    with unchanged(model):
        for name in STRENGTHS:
            with case(name):
                check_remedy(model, name, kind, carrier)


def check_remedy(model: Model, name: str, kind: str, carrier: str) -> None:
    x = stream().requires_grad_()
    if kind not in ONLY.get(name, KINDS):
        with pytest.raises(UnsupportedOperationError, match=f"{name} needs (p.*-norm|seq)"), applied(model, name):
            pass
        return
    with applied(model, name, strength=STRENGTHS[name]) as given:
        if name in NEED_VALUES and carrier == "torch with weights":
            with pytest.raises(UnsupportedOperationError, match="product of attention probabilities and values"):
                model(x)
            return
        unseen = carrier == "torch with weights" or (carrier == "eager" and name == "differential_attention")
        if name in NEED_QUERIES and unseen:
            with pytest.raises(UnsupportedOperationError, match="queries and keys of block 0 cannot be changed"):
                model(x)
            return
        got = model(x)
        leaves = [x, *model.parameters(), *given.parameters()]
        direction = stream(4)
        got_gradients = torch.autograd.grad((got * direction).sum(), leaves, allow_unused=True)
        gates = dict(enumerate(given.parameters())) if name == "gated_attention" else None
    want = forward_under(name, STRENGTHS[name], model, x, gates)
    want_gradients = torch.autograd.grad((want * direction).sum(), leaves, allow_unused=True)
    assert relative(got, want) < 1e-11
    plain = forward_under("", 0.0, model, x)
    assert relative(want, plain) > 1e-3, "the remedy changes nothing here: the test is empty"
    scale = max(float(g.abs().max()) for g in want_gradients if g is not None)
    for mine, theirs in zip(got_gradients, want_gradients, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert float((mine - theirs).abs().max()) < 1e-10 * scale


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_neutral_strength_leaves_the_model_as_it_is(kind: str, carrier: str) -> None:
    model, x = build(kind, carrier, True, DEPTH), stream()
    names = [name for name in STRENGTHS if REMEDIES[name].neutral is not None and kind in ONLY.get(name, KINDS)]
    hidden = (*NEED_VALUES, *NEED_QUERIES) if carrier == "torch with weights" else ()
    with torch.no_grad(), unchanged(model):
        bare = model(x)
        for name in names:
            if name not in hidden:
                with case(name), applied(model, name, strength=REMEDIES[name].neutral, inputs=x):
                    assert relative(model(x), bare) < 1e-13
                assert torch.equal(model(x), bare), name


def test_remedies_nest_in_order() -> None:
    """Shaped attention of centred attention: alpha I + beta (P - U) - gamma U."""
    model, x = build("pre", "sdpa", False, 1), stream()
    with torch.no_grad(), applied(model, "centred_attention", inputs=x), applied(model, "shaped_attention"):
        both = model(x)
    with torch.no_grad(), applied(model, "shaped_attention", strength=1.0, inputs=x) as given:
        given.grafts[0].gains._start["gamma"] = 2.0
        assert relative(both, model(x)) < 1e-13


class Looped(nn.Module):
    """Two blocks, called three times each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(build(kind, "sdpa", False, 1).blocks[0] for kind in ("pre", "post"))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return x


def test_branches_of_blocks_that_are_called_again_are_divided_by_their_calls() -> None:
    """Two different blocks, three calls each: 0.7 / (3 sqrt(2)) on every branch."""
    model, x = Looped().double(), stream()
    want, factor = x, 0.7 / (3 * 2**0.5)
    with torch.no_grad(), applied(model, "loop_scale", strength=0.7, inputs=x):
        got = model(x)
    for number in range(6):
        block = model.blocks[number % 2]
        if block.kind == "pre":
            want = want + factor * block.attention(block.norm1(want))
            want = want + factor * block.mlp(block.norm2(want))
        else:
            want = block.norm1(want + factor * block.attention(want))
            want = block.norm2(want + factor * block.mlp(want))
    assert relative(got, want) < 1e-12
    with (
        pytest.raises(UnsupportedOperationError, match="needs shared blocks"),
        applied(build("pre", "sdpa", False), "loop_scale", inputs=x),
    ):
        pass
