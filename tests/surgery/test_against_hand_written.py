"""Every operation held against the same cut written out by hand: outputs, gradients, attention probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope import Surgery
from rankscope.errors import UnsupportedOperationError
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import known_view
from rankscope.surgery.operating import operate
from tests.loops import case, unchanged
from tests.surgery.written_out import CARRIERS, DIM, KINDS, Cut, Model, build, forward_with, visible

TOKENS = 7
CUTS: dict[str, tuple[dict[str, Any], Cut]] = {
    "no skip": ({"skip": 0.0}, Cut(attention_skip=0.0, mlp_skip=0.0)),
    "half a skip": ({"skip": 0.5}, Cut(attention_skip=0.5, mlp_skip=0.5)),
    "no attention skip": ({"attention_skip": 0.0}, Cut(attention_skip=0.0)),
    "mlp skip of -2": ({"mlp_skip": -2.0}, Cut(mlp_skip=-2.0)),
    "no mlp": ({"mlp": "drop"}, Cut(drop=True)),
    "pure attention": ({"skip": 0.0, "mlp": "drop"}, Cut(attention_skip=0.0, mlp_skip=0.0, drop=True)),
    "half, no mlp": ({"skip": 0.5, "mlp": "drop"}, Cut(attention_skip=0.5, mlp_skip=0.5, drop=True)),
    "no norm": ({"norm": "identity"}, Cut(norm="identity")),
    "unit length": ({"norm": "scale"}, Cut(norm="scale")),
    "rms": ({"norm": "rms"}, Cut(norm="rms")),
    "causal": ({"mask": "causal"}, Cut(mask="causal")),
    "window": ({"mask": "window(2)"}, Cut(mask="window(2)")),
    "within window": ({"mask": "window(2)", "mask_mode": "intersect"}, Cut(mask="window(2)", mode="intersect")),
    "and window": ({"mask": "window(2)", "mask_mode": "unite"}, Cut(mask="window(2)", mode="unite")),
    "hot": ({"temperature": 3.0}, Cut(temperature=3.0)),
    "uniform": ({"attention": "uniform"}, Cut(uniform=True)),
    "centred": ({"attention": "centred"}, Cut(centred=True)),
    "attnscale": ({"attention_scale": 1.7}, Cut(scale=1.7)),
    "one head": ({"heads": [0, 2]}, Cut(heads=(0, 2))),
    "all of it": (
        {
            "skip": 0.3, "norm": "rms", "mask": "causal", "mask_mode": "intersect", "temperature": 0.5,
            "attention": "centred", "attention_scale": 2.0, "heads": [1],
        },
        Cut(0.3, 0.3, False, "rms", "causal", "intersect", 0.5, False, True, 2.0, (1,)),
    ),
    "uniform, causal": (
        {"attention": "uniform", "mask": "causal", "temperature": 9.0}, Cut(mask="causal", uniform=True)
    ),
}  # fmt: skip
SCORES_HOLD_THE_MASK = ("eager", "torch with weights")


def stream(tokens: int = TOKENS) -> Tensor:
    return torch.randn(2, tokens, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def gradients(out: Tensor, model: Model, x: Tensor) -> list[Tensor]:
    direction = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(4))
    leaves = [x, *model.parameters()]
    found = torch.autograd.grad((out * direction).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, found, strict=True)]


def close(got: Tensor, want: Tensor) -> bool:
    return all_close([got], [want])


def all_close(got: list[Tensor], want: list[Tensor]) -> bool:
    """Equal to 1e-10 of the largest entry of all: some gradients are zero but for rounding."""
    scale = max(float(b.detach().abs().max()) for b in want)
    apart = max(float((a - b).detach().abs().max()) for a, b in zip(got, want, strict=True))
    return scale > 0 and apart <= 1e-10 * scale


def assert_same(model: Model, operation: dict[str, Any], cuts: list[Cut]) -> None:
    x = stream().requires_grad_()
    want = forward_with(model, x, cuts)
    want_gradients = gradients(want.out, model, x)
    probs: dict[int, Tensor] = {}

    def keep(ref: SiteRef, value: Tensor | AttentionCall) -> None:
        assert isinstance(value, AttentionCall)
        probs[ref.layer] = value.probs().detach().clone()

    with operate(model, Surgery(**operation)):
        out = model(x)
        got_gradients = gradients(out, model, x)
        view = known_view(model)
        assert view is not None
        with trace(view, SiteSelection.parse(["attention.probs"]), keep):
            assert torch.equal(model(x), out)
    assert close(out, want.out)
    assert all_close(got_gradients, want_gradients)
    for layer, expected in enumerate(want.probs):
        assert close(probs[layer], expected)


@contextmanager
def seen(kind: str, carrier: str, causal: bool) -> Iterator[Model]:
    """A model whose structure is known: finding it takes longer than a cut."""
    model = build(kind, carrier, causal)
    with operate(model, inputs=stream(9)):
        pass
    with unchanged(model):
        yield model


@pytest.mark.sampled(6)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_as_written_out(causal: bool, kind: str, carrier: str) -> None:
    with seen(kind, carrier, causal) as model:
        for name, (operation, cut) in CUTS.items():
            with case(name):
                check_cut(model, operation, cut, causal, kind, carrier)


def check_cut(model: Model, operation: dict[str, Any], cut: Cut, causal: bool, kind: str, carrier: str) -> None:
    if kind == "parallel" and cut.attention_skip != cut.mlp_skip:
        with pytest.raises(UnsupportedOperationError, match="one skip"), operate(model, Surgery(**operation)):
            pass
        return
    reveals = bool((visible(cut, TOKENS, causal) & ~visible(Cut(), TOKENS, causal)).any())
    if reveals and carrier in SCORES_HOLD_THE_MASK:
        with (
            pytest.raises(UnsupportedOperationError, match="already inside its scores"),
            operate(model, Surgery(**operation)),
        ):
            model(stream())
        return
    assert_same(model, operation, [cut, cut])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_only(kind: str, carrier: str) -> None:
    with seen(kind, carrier, True) as model:
        for name in ("half a skip", "no mlp", "unit length", "within window", "centred", "one head"):
            operation, cut = CUTS[name]
            for layer in (0, 1):
                cuts = [cut if layer == number else Cut() for number in (0, 1)]
                with case(name, "in block", layer):
                    assert_same(model, {**operation, "layers": layer}, cuts)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_without_a_cut_is_the_model(kind: str) -> None:
    for carrier in CARRIERS:
        for causal in (False, True):
            model = build(kind, carrier, causal)
            assert close(forward_with(model, stream(), [Cut(), Cut()]).out, model(stream()))


def test_the_cuts_differ_from_the_model_and_from_each_other() -> None:
    model = build("pre", "sdpa", False)
    outs = [forward_with(model, stream(), [cut, cut]).out for _, cut in CUTS.values()]
    alike = {"window", "within window"}, {"causal"}
    for i, left in enumerate(CUTS):
        for j, right in enumerate(CUTS):
            if i < j and {left, right} not in alike:
                assert not close(outs[i], outs[j]), (left, right)
    changed = [name for name, out in zip(CUTS, outs, strict=True) if not close(out, model(stream()))]
    assert set(CUTS) - set(changed) == {"and window"}
