"""The tracer held against models that say themselves what happens at every site."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from rankscope.errors import SiteError
from rankscope.models.view import ModelView
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.discovery import discover
from rankscope.stream.sites import SITES, SiteRef, SiteSelection
from rankscope.stream.tracer import Observed, Unreadable, trace
from tests.own_models import GPT, InlineGPT, ids

EVERY_SITE = SiteSelection.parse(SITES)


def build(kind: str, **options: object) -> tuple[GPT, ModelView]:
    torch.manual_seed(0)
    model = GPT(kind, **options).eval()  # type: ignore[arg-type]
    return model, discover(model, lambda: model(ids()), batch=2)


def observed(view: ModelView, *inputs: Tensor) -> dict[SiteRef, Tensor]:
    seen: dict[SiteRef, Tensor] = {}

    def keep(ref: SiteRef, value: Observed) -> None:
        assert ref not in seen
        if isinstance(value, Unreadable):
            assert ref.site == "attention.state"  # of models from transformers only
            return
        if isinstance(value, tuple):
            value = torch.stack(value)
        seen[ref] = value.probs().clone() if isinstance(value, AttentionCall) else value.clone()

    with torch.no_grad(), trace(view, EVERY_SITE, keep):
        view.model(*inputs)
    return seen


@pytest.mark.parametrize("kind", ["pre", "post", "parallel", "inplace", "bare"])
def test_every_site_shows_what_the_model_computed(kind: str) -> None:
    model, view = build(kind)
    seen = observed(view, ids(3, 7))
    for layer, block in enumerate(model.blocks):
        block.sites = []
        with torch.no_grad():
            block(seen[SiteRef(None, layer, "block.in")].clone())
        said, block.sites = dict(block.sites), None
        shown = {ref.site: value for ref, value in seen.items() if ref.layer == layer}
        assert set(said) <= set(shown)
        for site, value in said.items():
            assert torch.equal(shown[site], value), (layer, site)
        assert torch.equal(shown["attention.probs"], block.attention.last_probs)
        assert torch.equal(shown["block.update"], torch.stack([shown["block.in"], shown["block.out"]]))
        for site, value in shown.items():
            branch = site.removesuffix(".update")
            if site != branch and branch != "block":
                stream, written = value
                assert torch.equal(written, shown[f"{branch}.out"]), (layer, site)
                assert torch.equal(stream + written, shown[f"{branch}.sum"]), (layer, site)


def test_streams_are_chained_and_the_final_norm_is_seen() -> None:
    model, view = build("pre")
    seen = observed(view, ids())
    for layer in (1, 2):
        assert torch.equal(seen[SiteRef(None, layer, "block.in")], seen[SiteRef(None, layer - 1, "block.out")])
    last = seen[SiteRef(None, 2, "block.out")]
    assert torch.equal(seen[SiteRef(None, 2, "final")], model.norm(last).detach())


def test_blocks_that_are_no_modules_are_cut_out_of_the_stream() -> None:
    torch.manual_seed(0)
    model = InlineGPT().eval()
    x = torch.randn(2, 9, 32)
    view = discover(model, lambda: model(x), batch=2)
    seen = observed(view, x)
    with torch.no_grad():
        for layer, (attention, mlp) in enumerate(zip(model.attentions, model.mlps, strict=True)):
            assert torch.equal(seen[SiteRef(None, layer, "block.in")], x)
            x = x + attention(x)
            assert torch.equal(seen[SiteRef(None, layer, "attention.sum")], x)
            x = x + mlp(x)
            assert torch.equal(seen[SiteRef(None, layer, "block.out")], x)
        assert torch.equal(seen[SiteRef(None, 2, "final")], model.norm(x))


@pytest.mark.parametrize("kind", ["pre", "post", "parallel", "inplace", "bare"])
def test_outputs_are_bit_identical(kind: str) -> None:
    model, view = build(kind)
    with torch.no_grad():
        bare = model(ids())
        with trace(view, EVERY_SITE, lambda ref, value: None):
            traced = model(ids())
    assert torch.equal(bare, traced)


def test_gradients_are_bit_identical() -> None:
    model, view = build("pre")
    model(ids()).square().sum().backward()
    bare = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with trace(view, EVERY_SITE, lambda ref, value: None):
        model(ids()).square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(bare, model.parameters(), strict=True))


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("fails", ["observer", "model"])
def test_nothing_is_left_when_something_raises(fails: str) -> None:
    model, view = build("pre")

    def observer(ref: SiteRef, value: object) -> None:
        if fails == "observer":
            raise RuntimeError("observer")

    bad = ids() + (1000 if fails == "model" else 0)
    with pytest.raises((RuntimeError, IndexError)), trace(view, EVERY_SITE, observer):
        model(bad)
    assert hooks_of(model) == 0
    assert torch.overrides._get_current_function_mode() is None
    assert torch.backends.mha.get_fastpath_enabled()
    assert len(observed(view, ids())) == 3 * 13 + 1


def test_a_block_that_does_not_run_is_named() -> None:
    model, view = build("pre")
    model.used = 2
    with (
        pytest.raises(SiteError, match=r"Only 2 of 3 block calls.*blocks\.2"),
        trace(view, EVERY_SITE, lambda *_: None),
    ):
        model(ids())


def test_an_add_that_does_not_happen_is_named() -> None:
    model, view = build("pre")
    model.blocks[1].kind = "bare"
    with (
        pytest.raises(SiteError, match=r"block 1 \(blocks\.1\).*0 of 2 adds"),
        trace(view, EVERY_SITE, lambda *_: None),
    ):
        model(ids())


def test_several_passes_and_other_shapes_under_one_trace() -> None:
    model, view = build("pre")
    shapes = []
    with torch.no_grad(), trace(view, SiteSelection.parse(["block.out@2"]), lambda ref, x: shapes.append(x.shape)):
        for batch, tokens in ((1, 5), (4, 3), (2, 2)):
            model(ids(batch, tokens))
    assert shapes == [(1, 5, 32), (4, 3, 32), (2, 2, 32)]


def test_the_tracer_keeps_no_activation_alive() -> None:
    model, view = build("pre")

    def alive() -> int:
        gc.collect()
        return sum(type(item) is Tensor and item.shape == (3, 13, 32) for item in gc.get_objects())

    with torch.no_grad(), trace(view, EVERY_SITE, lambda ref, value: None):
        model(ids(3, 13))
        assert alive() == 0
