"""Every remedy held against its formulas written out by hand: outputs and gradients, in four ways to attend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rankscope.errors import UnsupportedOperationError
from rankscope.remedies import REMEDIES, applied
from rankscope.surgery.operating import operate
from tests.loops import case, unchanged
from tests.remedies.written_out import forward_under
from tests.surgery.written_out import CARRIERS, DIM, KINDS, Model, build

# One strength per remedy at which it does something; twice the default of those that begin as nothing.
STRENGTHS = {
    "residual_scale": 0.7, "skipinit": 0.3, "stronger_skip": 1.7, "pre_norm": 1.0, "deepnorm": 1.0,
    "value_skipinit": 0.4, "shaped_attention": 0.8, "centred_attention": 0.6, "neutreno": 0.6, "qk_norm": 1.3,
}  # fmt: skip
ONLY = {"pre_norm": ("post",), "deepnorm": ("post",)}
DEPTH = 3


def stream(seed: int = 3) -> Tensor:
    return torch.randn(2, 7, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_every_remedy_is_written_out() -> None:
    assert set(STRENGTHS) == set(REMEDIES)


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
        with pytest.raises(UnsupportedOperationError, match=f"{name} needs post-norm"), applied(model, name):
            pass
        return
    with applied(model, name, strength=STRENGTHS[name]) as given:
        if name == "neutreno" and carrier == "torch with weights":
            with pytest.raises(UnsupportedOperationError, match="product of attention probabilities and values"):
                model(x)
            return
        if name == "qk_norm" and carrier == "torch with weights":
            with pytest.raises(UnsupportedOperationError, match="queries and keys of block 0 cannot be changed"):
                model(x)
            return
        got = model(x)
        leaves = [x, *model.parameters(), *given.parameters()]
        direction = stream(4)
        got_gradients = torch.autograd.grad((got * direction).sum(), leaves, allow_unused=True)
    want = forward_under(name, STRENGTHS[name], model, x)
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
    hidden = ("neutreno", "qk_norm") if carrier == "torch with weights" else ()
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
