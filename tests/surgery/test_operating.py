"""``operate`` as a context: nesting, places, errors, descriptions; nothing is left behind."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from rankscope import Surgery
from rankscope.errors import InputError, SiteError, UnsupportedOperationError
from rankscope.models.loading import load
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.stream.sites import SITES, SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import known_view
from rankscope.surgery.operating import operate, operating
from rankscope.surgery.operation import Operation
from rankscope.surgery.session import _SURGEONS, operations_on
from tests.own_models import GPT, Block, InlineGPT, ids


def gpt(kind: str = "pre", **options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(kind, **options).double().eval()


def run(model: nn.Module, *operations: dict[str, Any]) -> Tensor:
    """The output under nested operations, the first outermost."""
    if not operations:
        with torch.no_grad():
            out: Tensor = model(ids())
            return out
    with operate(model, Surgery(**operations[0]), inputs=ids()):
        return run(model, *operations[1:])


def assert_clean(model: nn.Module) -> None:
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0
    assert not _get_current_function_mode_stack()
    assert model not in _SURGEONS
    assert operations_on(model) == ()
    assert torch.backends.mha.get_fastpath_enabled()


SAME: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "gains multiply": ([{"skip": 0.5}, {"attention_skip": 3.0}], {"attention_skip": 1.5, "mlp_skip": 0.5}),
    "a gain and its inverse": ([{"skip": 0.25}, {"skip": 4.0}], {}),
    "zero wins": ([{"skip": 0.0}, {"skip": 7.0}], {"skip": 0.0}),
    "temperatures multiply": ([{"temperature": 2.0}, {"temperature": 4.0}], {"temperature": 8.0}),
    "factors multiply": ([{"attention_scale": 2.0}, {"attention_scale": 1.5}], {"attention_scale": 3.0}),
    "centred once": ([{"attention": "centred"}, {"attention": "centred"}], {"attention": "centred"}),
    "heads add up": ([{"heads": [0]}, {"heads": [0, 2]}], {"heads": [0, 2]}),
    "attention inside a skip": ([{"skip": 0.5}, {"temperature": 2.0}], {"skip": 0.5, "temperature": 2.0}),
    "the innermost norm": ([{"norm": "rms"}, {"norm": "scale"}], {"norm": "scale"}),
    "the last mask": ([{"mask": "window(0)"}, {"mask": "causal"}], {"mask": "causal"}),
    "masks in order": (
        [{"mask": "window(2)"}, {"mask": "causal", "mask_mode": "intersect"}],
        {"mask": "window(2) & causal"},
    ),
    "a mask after a temperature": ([{"temperature": 9.0}, {"mask": "causal"}], {"mask": "causal", "temperature": 9.0}),
    "uniform after a temperature": ([{"temperature": 9.0}, {"attention": "uniform"}], {"attention": "uniform"}),
    "layers": ([{"skip": 0.5, "layers": 0}, {"skip": 0.5, "layers": [1, 2]}], {"skip": 0.5}),
    "no layer": ([{"skip": 0.5, "layers": []}], {}),
}


@pytest.mark.parametrize("name", SAME)
def test_nesting(name: str) -> None:
    model = gpt(causal=False)
    nested, single = SAME[name]
    want = run(model, single)
    assert float((run(model, *nested) - want).abs().max()) <= 1e-13 * float(want.abs().max())
    assert_clean(model)


def test_leaving_an_inner_block_leaves_the_outer_one() -> None:
    model = gpt(causal=False)
    with operate(model, Surgery(mask="causal"), inputs=ids()):
        outer = model(ids())
        with operate(model, Surgery(mask="window(1)")):
            with operate(model, Surgery(mask="causal")):
                assert len(operations_on(model)) == 3
                assert torch.equal(model(ids()), outer)
            assert [operation["mask"] for operation in operations_on(model)] == ["causal", "window(1)"]
            assert not torch.equal(model(ids()), outer)
        assert torch.equal(model(ids()), outer)
    assert_clean(model)


def test_a_refused_inner_block_leaves_the_outer_one() -> None:
    model = gpt("parallel")
    with operate(model, Surgery(skip=0.5), inputs=ids()):
        before = model(ids())
        with pytest.raises(UnsupportedOperationError, match="one skip"), operate(model, Surgery(attention_skip=0.0)):
            pass
        assert operations_on(model) == ({"attention_skip": 0.5, "mlp_skip": 0.5},)
        assert torch.equal(model(ids()), before)
    assert_clean(model)


def test_part_of_a_model_under_surgery_is_refused() -> None:
    with quiet_transformers():
        model = load("init:tiny-llama").model
    outer = nn.Sequential(model)
    for first, second in ((outer, model), (model, outer)):
        with (
            operating(first, Operation(attention_skip=0.5), inputs=ids()),
            pytest.raises(InputError, match="parts of one model"),
            operating(second, Operation(), inputs=ids()),
        ):
            pass
        assert_clean(first)


@pytest.mark.parametrize("fails", ["body", "model", "observer", "block"])
def test_nothing_is_left_when_something_raises(fails: str) -> None:
    model = gpt()
    bare = run(model)

    def observer(ref: object, value: object) -> None:
        if fails == "observer":
            raise RuntimeError("observer")

    def broken(module: nn.Module, args: object) -> None:
        raise RuntimeError("block")

    handle = model.blocks[1].mlp.register_forward_pre_hook(broken) if fails == "block" else None

    def body() -> None:
        with operate(model, Surgery(skip=0.0, temperature=2.0), inputs=ids(3)):
            view = known_view(model)
            assert view is not None
            with trace(view, SiteSelection.parse(SITES), observer):
                model(ids() + (1000 if fails == "model" else 0))
            raise RuntimeError("body")

    with pytest.raises((RuntimeError, IndexError), match=fails if fails != "model" else "index out of range"):
        body()
    if handle is not None:
        handle.remove()
    assert_clean(model)
    assert torch.equal(run(model), bare)
    assert not torch.equal(run(model, {"skip": 0.0}), bare)


def test_a_pass_that_fails_does_not_spoil_the_next() -> None:
    model = gpt()
    want = run(model, {"skip": 0.5, "heads": [0]})
    with operate(model, Surgery(skip=0.5, heads=[0]), inputs=ids()):
        with pytest.raises(IndexError):
            model(ids() + 1000)
        model.blocks[2].kind = "bare"
        with pytest.raises(SiteError, match="0 of 2 adds"):
            model(ids())
        model.blocks[2].kind = "pre"
        assert torch.equal(model(ids()), want)


def test_places() -> None:
    with quiet_transformers():
        model = load("init:tiny-bart", dtype=torch.float64).model.eval()
    tokens = ids()

    def outputs() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out = model(input_ids=tokens, decoder_input_ids=tokens, use_cache=False)
        return out.encoder_last_hidden_state, out.last_hidden_state

    bare = outputs()
    with operate(model, Surgery(skip=0.5, stack="decoder")):
        decoder_only = outputs()
    assert torch.equal(decoder_only[0], bare[0])
    assert not torch.equal(decoder_only[1], bare[1])
    with operate(model, Surgery(skip=0.5, stack="encoder")):
        encoder_only = outputs()
    assert not torch.equal(encoder_only[0], bare[0])
    with operate(model, Surgery(skip=0.5, stack="encoder")), operate(model, Surgery(skip=0.5, stack="decoder")):
        nested = outputs()
    with operate(model, Surgery(skip=0.5)):
        both = outputs()
    assert torch.equal(nested[1], both[1])
    assert not torch.equal(both[1], decoder_only[1])
    with (
        pytest.raises(InputError, match=r"stack='text': this model has encoder, decoder"),
        operate(model, Surgery(stack="text")),
    ):
        pass


def test_a_mask_leaves_cross_attention_alone() -> None:
    with quiet_transformers():
        model = load("init:tiny-bart", dtype=torch.float64).model.eval()
    seen: dict[str, Tensor] = {}
    with operate(model, Surgery(mask="window(1)", mask_mode="intersect")):
        view = known_view(model)
        assert view is not None
        chosen = SiteSelection.parse(["attention.probs", "cross_attention.probs"])
        with torch.no_grad(), trace(view, chosen, lambda ref, call: seen.setdefault(f"{ref}", call.probs())):
            model(input_ids=ids(2, 12), decoder_input_ids=ids(2, 9), use_cache=False)
    assert bool((seen["decoder block 0 cross_attention.probs"] > 0).all())
    band = torch.ones(9, 9).tril().triu(-1).bool()
    assert torch.equal(seen["decoder block 0 attention.probs"] > 0, band.expand(2, 4, 9, 9))


def test_the_final_norm_of_a_stack_in_one_module_is_kept() -> None:
    from x_transformers import Encoder

    torch.manual_seed(0)
    model, x = Encoder(dim=32, depth=2, heads=4).double().eval(), torch.randn(2, 7, 32, dtype=torch.float64)
    with operate(model, Surgery(norm="identity"), inputs=x), torch.no_grad():
        out = model(x)
    assert float(out.mean(dim=-1).abs().max()) < 1e-12
    assert float((out.var(dim=-1, unbiased=False) - 1).abs().max()) < 1e-3


def test_layers_of_blocks_that_are_no_modules() -> None:
    torch.manual_seed(0)
    model, x = InlineGPT().double().eval(), torch.randn(2, 9, 32, dtype=torch.float64)
    with torch.no_grad():
        with operate(model, Surgery(attention_skip=0.5, mlp="drop", layers=[1]), inputs=x):
            got = model(x)
        for layer, (attention, mlp) in enumerate(zip(model.attentions, model.mlps, strict=True)):
            x = (0.5 if layer == 1 else 1.0) * x + attention(x)
            x = x if layer == 1 else x + mlp(x)
        assert float((got - model.norm(x)).abs().max()) < 1e-12


class OneAfterTheOther(Block):
    """Parallel branches, added one after the other, the MLP first or last."""

    mlp_first = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        attention, mlp = self.attention(y), self.mlp(y)
        return x + mlp + attention if self.mlp_first else x + attention + mlp


@pytest.mark.parametrize("mlp_first", [False, True])
@pytest.mark.parametrize("skip", [0.0, 0.5])
@pytest.mark.parametrize("mlp", ["keep", "drop"])
def test_parallel_branches_added_one_after_the_other(mlp: str, skip: float, mlp_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(OneAfterTheOther(32, 4, "pre", True) for _ in range(2))
    model.forward = lambda x: model.layers[1](model.layers[0](x))
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    for layer in model.double().layers:
        layer.mlp_first = mlp_first
    with torch.no_grad():
        with operate(model, Surgery(skip=skip, mlp=mlp), inputs=x):
            got = model(x)
        for layer in model.layers:
            y = layer.norm1(x)
            x = skip * x + layer.attention(y) + (layer.mlp(y) if mlp == "keep" else 0)
    assert float((got - x).abs().max()) <= 1e-13 * float(x.abs().max())


@pytest.mark.parametrize("skip", [0.0, 0.5])
def test_adds_in_place_are_cut_like_others(skip: float) -> None:
    inplace, plain = gpt("inplace"), gpt("pre")
    plain.load_state_dict(inplace.state_dict())
    for changes in ({"skip": skip}, {"skip": skip, "mlp": "drop"}, {"attention_skip": skip, "layers": 1}):
        assert torch.equal(run(inplace, changes), run(plain, changes))


def test_operations_on_a_model() -> None:
    model = gpt()
    with operate(model, Surgery(skip=0.0, layers=np.arange(2), heads=np.int64(1)), inputs=ids()) as operation:
        expected = {"attention_skip": 0.0, "mlp_skip": 0.0, "heads": [1], "layers": [0, 1]}
        assert json.loads(json.dumps(operations_on(model))) == [expected]
        assert operation.describe() == expected
    assert operations_on(model) == ()


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"mlp": "none"}, r"mlp='none': expected 'keep' or 'drop'"),
    ({"skip": float("nan")}, "expected a finite number"),
    ({"temperature": 0.0}, "expected a positive number"),
    ({"layers": [3]}, r"layers=\[3\]: this model has blocks 0 to 2"),
    ({"layers": -1}, "expected a list of: a whole number, 0 or more"),
    ({"heads": [-1]}, "expected a list of: a whole number, 0 or more"),
)


@pytest.mark.parametrize(("operation", "message"), WRONG)
def test_wrong_arguments_are_named(operation: dict[str, Any], message: str) -> None:
    model = gpt()
    with pytest.raises(InputError, match=message), operate(model, Surgery(**operation), inputs=ids()):
        pass
    assert_clean(model)


def test_an_unknown_module_needs_inputs_once() -> None:
    model = gpt()
    with pytest.raises(InputError, match="Pass inputs="), operate(model, Surgery(skip=0.5)):
        pass
    with operate(model, inputs=ids()):
        pass
    with operate(model, Surgery(skip=0.5)):
        assert not torch.equal(model(ids()), run(gpt()))
