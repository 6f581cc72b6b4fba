"""The operations of a pass are those of the one before, unless code or settings changed; nothing else is a change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.monitor import Alarm
from rankscope.monitor.same_code import SameCode
from tests.monitor.trainings import VOCABULARY, alarms_raised, batches, bert, gpt2, probe

LOOKS, CHANGED = 8, 6
Change = Callable[[Any, int], object]


def departures(model: Any, change: Change, *, rate: float = 1e-2) -> list[tuple[int, str]]:
    """What is found after each of eight steps of a training in which something is done before every step."""
    batch = prepare_inputs(load(model), {"input_ids": probe()["input_ids"]})[0]
    code, found = SameCode(), []
    learned = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=rate)
    for step, one in enumerate(batches(LOOKS)):
        change(model, step)
        model(**one).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        words = code.take(model, batch, step)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert model.training
        assert all(one.requires_grad for one in learned)
        if words:
            found.append((step, words))
    return found


def once(act: Callable[[Any], object]) -> Change:
    return lambda model, step: act(model) if step == CHANGED else None


def hooked(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return once(lambda model: model.get_submodule(name).register_forward_hook(lambda m, args, out: change(out)))


def entering(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    def act(model: Any) -> None:
        model.get_submodule(name).register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:]))

    return once(act)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (hooked("transformer.h.1.mlp.act", lambda out: out.abs()), "now abs of"),
        (hooked("transformer.h.0.attn.c_proj", lambda out: 1.1 * out), "now mul of"),
        (hooked("transformer.h.0.attn.c_attn", lambda out: out.roll(1, 1)), "now roll of"),
        (hooked("transformer.wpe", lambda out: out[:, :1].expand_as(out)), "now slice of"),
        (entering("transformer.wte", lambda ids: ids.clamp(max=20)), "now clamp of view (None; 20"),
        (hooked("lm_head", lambda out: 2.0 * out), "mul of _unsafe_view"),
    ],
)  # fmt: skip
def test_code_that_changes_is_found_at_its_first_operation_with_file_and_line(change: Change, said: str) -> None:
    ((step, words),) = departures(gpt2(dropout=0.0), change)
    assert step == CHANGED
    assert said in words
    assert "test_same_code.py:" in words
    assert words.endswith("(step 5)")


def test_a_number_that_code_sets_on_a_module_is_told_once_and_one_that_changes_all_along_is_not() -> None:
    def annealed(model: Any, step: int) -> None:
        model.transformer.drop.p = 0.1 * step

    found = departures(gpt2(dropout=0.0), once(lambda model: setattr(model.transformer.drop, "p", 0.9)))
    assert found == [(CHANGED, "transformer.drop.p was set to 0.9, and was 0")]
    assert departures(gpt2(dropout=0.0), annealed) == []


def noisy(model: Any, step: int) -> None:
    """Draws in evaluation mode too, from the start."""
    if step == 0:
        model.transformer.wte.register_forward_hook(lambda m, args, out: out + 0.1 * torch.randn_like(out))


def annealed(model: Any, step: int) -> None:
    """A temperature that is a number of Python, lowered at every step."""
    for block in model.transformer.h:
        block.attn.c_attn.factor = 1.0 + step
        if step == 0:
            block.attn.c_attn.register_forward_hook(lambda module, args, out: module.factor * out)


def less_dropout(model: Any, step: int) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1 * (1 - step / LOOKS)


def replaced(model: Any, step: int) -> None:
    """Weights, not the code: those are other events."""
    if step == CHANGED:
        nn.init.normal_(model.transformer.h[0].mlp.c_fc.weight)
        model.transformer.wte.weight.data.mul_(10.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", [noisy, annealed, less_dropout, replaced, lambda model, step: None])
def test_healthy_trainings_never_depart(change: Change) -> None:
    """Hostile cases: a high rate, noise in evaluation mode, annealed numbers, dropout that falls, weights replaced."""
    assert departures(gpt2(dropout=0.1), change) == []
    assert departures(gpt2(dropout=0.1), change, rate=0.3) == []


def test_a_buffer_that_never_changed_is_part_of_the_function() -> None:
    """Rotary frequencies are in no checkpoint; a temperature that falls from the start on is no change."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            pad_token_id=0, initializer_range=0.5,
        )
    ).train()  # fmt: skip

    def frequencies(model: Any, step: int) -> None:
        if step == CHANGED:
            model.model.rotary_emb.inv_freq.zero_()

    ((step, words),) = departures(model, frequencies)
    assert step == CHANGED
    assert "model.rotary_emb.inv_freq" in words

    def temperature(model: Any, step: int) -> None:
        if step == 0:
            model.register_buffer("temperature", torch.ones(()))
            model.transformer.h[0].attn.register_forward_hook(
                lambda m, args, out: (out[0] * model.temperature, *out[1:])
            )
        model.temperature.mul_(0.5)

    assert departures(gpt2(dropout=0.0), temperature) == []


class Normed(nn.Module):
    """Running statistics, which training changes and evaluation uses."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm1d(width, momentum=0.9)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)


def test_buffers_are_those_of_the_weights() -> None:
    model = gpt2(dropout=0.0)
    for block in model.transformer.h:
        block.mlp = Normed(block.mlp, 16)
    assert departures(model, lambda model, step: None) == []
    statistics = model.transformer.h[0].mlp.norm.running_var
    assert not torch.allclose(statistics, torch.ones_like(statistics))


def events(model: Any, change: Change) -> list[Alarm]:
    def act(model: Any, optimizer: Any, step: int) -> None:
        change(model, step)

    return [one for one in alarms_raised(model, act, steps=28) if one.name == "model_changed"]


def test_a_module_that_is_another_one_is_an_event_and_no_alarm() -> None:
    def swap(model: Any, step: int) -> None:
        if step == 18:
            model.bert.encoder.layer[1].intermediate.intermediate_act_fn = nn.Identity()

    (event,) = events(bert(dropout=0.0), swap)
    assert (event.state, event.step, event.component) == ("noted", 20, "structure")
    assert "gelu of" in event.sentence
