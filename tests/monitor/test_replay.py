"""The weights of an earlier reading give what they gave, unless code or settings changed; nothing else is a change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope.models.inputs import Batch, prepare_inputs
from rankscope.models.loading import load
from rankscope.models.view import ModelView
from rankscope.monitor import Alarm
from rankscope.monitor.alarms import ALARMS
from rankscope.monitor.replay import Departure, Replay
from rankscope.stream.viewing import view_of
from tests.monitor.trainings import VOCABULARY, alarms_raised, batches, bert, gpt2, probe

LOOKS, CHANGED = 8, 6
Change = Callable[[Any, int], object]


def given(model: Any) -> tuple[ModelView, Batch]:
    batch = prepare_inputs(load(model), {"input_ids": probe()["input_ids"]})[0]
    return view_of(model, batch), batch


def departures(model: Any, change: Change, *, rate: float = 1e-2) -> list[tuple[int, Departure]]:
    """What is found after each of eight steps of a training in which something is done before every step."""
    view, batch = given(model)
    replay, found = Replay(), []
    learned = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=rate)
    for step, one in enumerate(batches(LOOKS)):
        change(model, step)
        model(**one).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        departure = replay.take(view, batch, step)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert model.training
        assert all(one.requires_grad for one in learned)
        if departure is not None:
            found.append((step, departure))
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
    ("change", "component"),
    [
        (hooked("transformer.h.1.mlp.act", lambda out: out.abs()), "mlp"),
        (hooked("transformer.h.0.attn.c_proj", lambda out: 1.1 * out), "attention"),
        (hooked("transformer.h.0.attn.c_attn", lambda out: out.roll(1, 1)), "attention"),
        (hooked("transformer.wpe", lambda out: out[:, :1].expand_as(out)), "embedding"),
        (entering("transformer.wte", lambda ids: ids.clamp(max=20)), "embedding"),
        (hooked("lm_head", lambda out: 2.0 * out), "head"),
    ],
)  # fmt: skip
def test_function_that_changes_is_found_where_it_changes(change: Change, component: str) -> None:
    ((step, departure),) = departures(gpt2(dropout=0.0), change)
    assert (step, departure.component) == (CHANGED, component)


def test_what_leaves_a_block_may_change_without_its_branches() -> None:
    change = hooked("transformer.h.0", lambda out: (0.1 * out[0], *out[1:]) if isinstance(out, tuple) else 0.1 * out)
    ((_, departure),) = departures(gpt2(dropout=0.0), change)
    assert departure.component == "structure"
    assert "the stream that leaves block 0 differs by 0.9, while the stream after mlp in block 0 is the same" in (
        departure.words
    )


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
    """Weights, not the function: that is for other alarms."""
    if step == CHANGED:
        nn.init.normal_(model.transformer.h[0].mlp.c_fc.weight)
        model.transformer.wte.weight.data.mul_(10.0)


def switched_on(model: Any, step: int) -> None:
    """Attention of the second block adds nothing until then, and a part of what it will in the first step after it."""
    projection = model.transformer.h[1].attn.c_proj
    projection.factor = min(1.0, max(0.0, (step - CHANGED + 1) / 2))
    if step == 0:
        projection.register_forward_hook(lambda module, args, out: module.factor * out)


def test_a_branch_that_changes_after_it_was_switched_on_is_found() -> None:
    def change(model: Any, step: int) -> None:
        projection = model.transformer.h[1].attn.c_proj
        projection.factor = 0.0 if step < 2 else 1.0 if step < CHANGED else -1.0
        if step == 0:
            projection.register_forward_hook(lambda module, args, out: module.factor * out)

    ((step, departure),) = departures(gpt2(dropout=0.0), change)
    assert (step, departure.component) == (CHANGED, "attention")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", [noisy, annealed, less_dropout, replaced, switched_on, lambda model, step: None])
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

    ((step, departure),) = departures(model, frequencies)
    assert (step, departure.component) == (CHANGED, "attention")

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


def alarms(model: Any, change: Change) -> list[Alarm]:
    def act(model: Any, optimizer: Any, step: int) -> None:
        change(model, step)

    return alarms_raised(model, act, steps=28)


def test_alarm_names_the_module_that_is_another_one() -> None:
    def swap(model: Any, step: int) -> None:
        if step == 18:
            model.bert.encoder.layer[1].intermediate.intermediate_act_fn = nn.Identity()

    found = [alarm for alarm in alarms(bert(dropout=0.0), swap) if alarm.name == "model_changed"]
    assert [(alarm.step, alarm.component) for alarm in found] == [(20, "structure")]
    assert "intermediate_act_fn is Identity() instead of GELUActivation()" in found[0].sentence
    assert "Compare the code and the configuration with those of step" in found[0].sentence


def test_alarm_is_raised_once_and_names_the_embedding() -> None:
    def change(model: Any, step: int) -> None:
        if step == 18:
            model.transformer.wpe.register_forward_hook(lambda module, args, out: out[:, :1].expand_as(out))

    raised = alarms(gpt2(dropout=0.0), change)
    named = {alarm.component for alarm in raised if alarm.step >= 18 and not ALARMS[alarm.name].is_note}
    assert named == {"embedding"}  # also of alarms before step 20; a note of a curve names none
    found = [alarm for alarm in raised if alarm.name == "model_changed"]
    assert [(alarm.step, alarm.component) for alarm in found] == [(20, "embedding")]
    assert math.isclose(found[0].evidence["structure_changes"], 1.0)
