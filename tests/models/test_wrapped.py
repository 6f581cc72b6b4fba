"""Compiled, quantised, adapted, offloaded models: equal to a plain twin, or refused by name."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rankscope as rs
from rankscope.errors import RankscopeError, UnsupportedConfigError
from rankscope.models.linear_maps import absence_of, dense, linear_map
from rankscope.models.wrapping import is_compiled, unwrapped
from tests.wrapped_models import (
    IDS,
    VERBS,
    WRAPPED,
    AdaptedLinear,
    InputQuantisingLinear,
    PackedLinear,
    SubclassLinear,
    Wrapped,
    llama,
)

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "wrapped_models.md"


def _values(run: Any) -> np.ndarray:
    return np.asarray(run.table["value"].to_numpy())


def _agrees(kind: Wrapped, verb: str) -> str:
    """Run a verb on a wrapped model and its twin; return the word for the table, or fail."""
    model = kind.wrap(llama())
    refused = dict(kind.refused)
    if verb in refused:
        with pytest.raises(RankscopeError, match=refused[verb]):
            VERBS[verb](model)
        return "refused"
    found = _values(VERBS[verb](model))
    expected = _values(VERBS[verb](llama() if kind.twin is None else kind.twin(model)))
    if kind.bits:
        np.testing.assert_array_equal(found, expected)
        return "same bits"
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    return "agrees"


SEEN_WITHOUT_ATTENTION = "custom operator"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in WRAPPED if name != SEEN_WITHOUT_ATTENTION])
def test_measure_agrees_with_the_plain_twin(name: str) -> None:
    assert _agrees(WRAPPED[name], "measure") != "refused"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WRAPPED if name != SEEN_WITHOUT_ATTENTION])
def test_the_table_of_the_docs_holds(name: str) -> None:
    kind = WRAPPED[name]
    cells = [_agrees(kind, verb) for verb in VERBS]
    row = f"| {kind.title} | {' | '.join(cells)} |"
    assert row in PAGE.read_text().splitlines(), f"the row of {PAGE.name} should be:\n{row}"


@pytest.mark.parametrize("name", ["compiled blocks", "compiled in place"])
def test_a_compiled_model_is_left_compiled(name: str) -> None:
    model = WRAPPED[name].wrap(llama())
    before = [(module, dict(module._modules), module._compiled_call_impl) for module in model.modules()]
    VERBS["decompose"](model)
    after = [(module, dict(module._modules), module._compiled_call_impl) for module in model.modules()]
    assert before == after
    assert is_compiled(model)


def test_before_torch_2_6_compiled_methods_are_refused_and_compiled_modules_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = llama()
    values = _values(rs.measure(plain, IDS))
    blocks, method = copy.deepcopy(plain), copy.deepcopy(plain)
    for block in blocks.layers:
        block.compile(backend="eager")
    method.layers[0].forward = torch.compile(method.layers[0].forward, backend="eager")
    monkeypatch.setattr("rankscope.models.wrapping.STANCES", "99.0")
    assert np.array_equal(_values(rs.measure(blocks, IDS)), values, equal_nan=True)
    with pytest.raises(UnsupportedConfigError, match=r"layers\.0 is a compiled function.*needs torch 99\.0"):
        rs.measure(method, IDS)


@pytest.mark.slow
def test_surgery_reaches_a_model_that_is_compiled() -> None:
    """Compiled code that ran before would otherwise run without the surgery."""
    plain = llama()
    compiled = torch.compile(copy.deepcopy(plain), backend="eager")
    with torch.no_grad():
        before = compiled(**IDS).last_hidden_state
        with rs.operate(plain, rs.Surgery(skip=0.0)):
            expected = plain(**IDS).last_hidden_state
        with rs.operate(compiled, rs.Surgery(skip=0.0)):
            found = compiled(**IDS).last_hidden_state
        assert torch.equal(found, expected)
        assert not torch.equal(found, before)
        assert torch.equal(compiled(**IDS).last_hidden_state, before)


LAYER = torch.nn.Linear(32, 24)


@pytest.mark.parametrize("make", [PackedLinear, SubclassLinear.of])
def test_a_quantised_layer_is_read_as_its_dequantised_weights(make: Callable[[nn.Linear], Any]) -> None:
    layer = make(copy.deepcopy(LAYER))
    read = linear_map(layer, "layer")
    assert torch.equal(read.weight, layer.dequantised())
    assert read.bias is not None
    assert torch.equal(read.bias, LAYER.bias)
    assert layer.bias is not None, "the bias is put back"


def test_an_adapter_is_read_as_the_merged_layer() -> None:
    layer = AdaptedLinear(copy.deepcopy(LAYER))
    torch.testing.assert_close(linear_map(layer, "layer").weight, layer.dequantised(), rtol=1e-6, atol=1e-7)


def test_a_parametrised_weight_is_read_as_it_is_applied() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(copy.deepcopy(LAYER))
    torch.nn.init.constant_(layer.parametrizations.weight.original0, 3.0)
    assert torch.equal(linear_map(layer, "layer").weight, layer.weight)


def test_a_layer_that_quantises_its_inputs_is_refused() -> None:
    with pytest.raises(UnsupportedConfigError, match=r"q_proj .* is not linear in its input"):
        linear_map(InputQuantisingLinear(copy.deepcopy(LAYER)), "q_proj")


def test_a_layer_that_quantises_its_inputs_in_a_hook_of_its_own_is_refused() -> None:
    """As quanto does; a hook of somebody else is left out."""

    class Hooked(PackedLinear):
        def quantise_input(self, module: nn.Module, given: tuple[torch.Tensor]) -> torch.Tensor:
            return (given[0] * 16).round() / 16

    layer = Hooked(copy.deepcopy(LAYER))
    layer.register_forward_pre_hook(lambda module, given: pytest.fail("not its own"))
    assert torch.equal(linear_map(layer, "q_proj").weight, layer.dequantised())
    layer.register_forward_pre_hook(layer.quantise_input)
    with pytest.raises(UnsupportedConfigError, match="not linear in its input"):
        linear_map(layer, "q_proj")


def test_a_layer_that_quantises_its_inputs_is_not_a_way_around_its_block() -> None:
    """Its kernel gets the stream and a scale that was computed from it, as a sum of the two would."""
    with pytest.raises(RankscopeError, match=r"layers.0.self_attn.q_proj .* is not linear in its input"):
        VERBS["exact"](WRAPPED["inputs quantised too"].wrap(llama()))


def test_a_layer_that_cannot_be_run_is_refused_by_its_tensors() -> None:
    stored = nn.Module()
    stored.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))
    with pytest.raises(UnsupportedConfigError, match="holds qweight instead of one weight"):
        linear_map(stored, "q_proj")


def test_a_packed_embedding_has_no_dense_equal() -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8))
    model[0].weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedConfigError, match=r"0 \(Embedding\) is stored in a packed format"), dense(model):
        pass


def test_dense_layers_are_taken_out_again_after_an_error() -> None:
    model = WRAPPED["packed"].wrap(llama())
    kinds = [type(module) for module in model.modules()]

    def fail() -> None:
        with dense(model):
            assert not any(isinstance(module, PackedLinear) for module in model.modules())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize(("name", "words"), [("empty", "ZeRO-3"), ("offloaded", "offloaded")])
@pytest.mark.parametrize("verb", ["exact", "decompose", "bound", "remedy"])
def test_weights_that_are_elsewhere_are_named_before_any_work(name: str, words: str, verb: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=rf"{verb} computes with the weights themselves.*{words}"):
        VERBS[verb](WRAPPED[name].wrap(llama()))


def test_doctor_does_not_call_heads_readable_that_are_elsewhere() -> None:
    checks = {check.name: check for check in rs.doctor(WRAPPED["offloaded"].wrap(llama()), IDS).checks}
    assert checks["heads"].status == "refused"
    assert "offloaded" in checks["heads"].detail
    assert absence_of(torch.empty(3)) is None


def test_attention_inside_an_operator_is_named() -> None:
    model = WRAPPED["custom operator"].wrap(llama())
    run = rs.measure(model, IDS)
    plain = rs.measure(llama(), IDS)
    assert any("rankscope_tests::flash" in note for note in run.notes)
    assert not any("attention metrics are not available" in note for note in plain.notes)
    for metric in ("relative_residual", "stable_rank"):
        np.testing.assert_allclose(
            run.curve(metric, "block.out").mean, plain.curve(metric, "block.out").mean, rtol=1e-5
        )
    check = next(check for check in rs.doctor(model, IDS).checks if check.name == "attention")
    assert check.status == "refused"
    assert "rankscope_tests::flash" in check.detail
    with pytest.raises(RankscopeError, match="rankscope_tests::flash"):
        rs.measure(model, IDS, metrics=["attention_entropy"])


@pytest.mark.parametrize("preset", ["tiny-bloom", "tiny-gemma2"])
def test_doctor_allows_for_a_softmax_in_float32_inside_a_float64_model(preset: str) -> None:
    check = next(c for c in rs.doctor(rs.Model(f"init:{preset}", dtype="float64")).checks if c.name == "attention")
    assert check.status == "pass"


class PeftModel(nn.Module):
    """PEFT's wrapper: what :func:`unwrapped` asks it."""

    active_adapter = "default"

    def __init__(self, model: nn.Module, virtual_tokens: int = 0) -> None:
        super().__init__()
        self.base_model = model
        self.active_peft_config = PromptTuningConfig(virtual_tokens > 0, virtual_tokens)

    def get_base_model(self) -> nn.Module:
        return self.base_model


@dataclass
class PromptTuningConfig:
    is_prompt_learning: bool
    num_virtual_tokens: int


def test_adapters_are_measured_in_place_and_prompt_tuning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("peft")
    vars(library).update(PeftModel=PeftModel, PeftMixedModel=PeftModel)
    monkeypatch.setitem(sys.modules, "peft", library)
    adapted = WRAPPED["adapters"].wrap(llama())
    assert unwrapped(PeftModel(adapted)) is adapted
    for verb in ("measure", "ablate", "exact", "decompose", "bound", "remedy"):
        with pytest.raises(UnsupportedConfigError, match=r"PromptTuningConfig puts 3 learned tokens before yours"):
            VERBS[verb](PeftModel(adapted, virtual_tokens=3))


def test_torchscript_is_refused_by_name() -> None:
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(UnsupportedConfigError, match="TorchScript"):
        unwrapped(scripted)


def test_a_step_of_generation_with_a_cache_is_refused() -> None:
    from transformers import StaticCache

    model = llama()
    cache = StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(RankscopeError, match="past_key_values is a StaticCache"):
        rs.measure(model, {**IDS, "past_key_values": cache})
