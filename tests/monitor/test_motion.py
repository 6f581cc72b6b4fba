"""Motion of every weight: what healthy trainings do is never a jump, and what something else writes is one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rankscope.monitor import Gauge
from tests.monitor.trainings import Low, alarms_raised, batches, bert, gpt2, probe

STEPS = 40
Change = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def trained(
    change: Change | None = None,
    *,
    kind: Callable[..., Any] = torch.optim.AdamW,
    build: Callable[[], Any] = lambda: gpt2(dropout=0.0),
    clip: Callable[[int], float] = lambda step: 1.0,
    given: Callable[[int], int] = lambda step: step,
    **options: Any,
) -> list[Any]:
    """The alarms of a training with these settings of its optimizer, read at every second step."""
    model = build()
    options = {"lr": 1e-3, **options}
    optimizer = kind(model.parameters(), **options)
    gauge = Gauge(model, {"input_ids": probe()["input_ids"]}, schedule=2, actions=(), strict=True)
    gauge.optimizers, found, data = (optimizer,), [], batches(48)
    for step in range(48):
        if change is not None:
            change(model, optimizer, step)
        optimizer.zero_grad()
        loss = model(**data[given(step)]).loss
        loss.backward()
        gauge.after_backward(step)
        nn.utils.clip_grad_norm_(model.parameters(), clip(step))
        optimizer.step()
        reading = gauge.step(step, loss=loss)
        found += [] if reading is None else [alarm for alarm in reading.alarms if alarm.state == "raised"]
    return found


def test_adapters_that_begin_at_zero_twice_are_named_whatever_gradients_frozen_weights_kept() -> None:
    def built() -> Any:
        model = gpt2(dropout=0.0)
        model(**batches(1)[0]).loss.backward()
        model.requires_grad_(False)
        for block in model.transformer.h:
            block.attn.c_attn = Low(block.attn.c_attn)
            nn.init.zeros_(block.attn.c_attn.down.weight)
        return model

    def keep(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:  # an optimizer of what learns clears nothing else
            learned = [one for one in model.parameters() if one.requires_grad]
            optimizer.param_groups[0]["params"] = learned

    (later,) = trained(build=built, change=keep)  # no copy is trained beside a training, so nothing is shown at once
    assert (later.name, later.component) == ("still_weights", "gradients")
    assert "the gradient of every parameter is exactly zero" in later.sentence


def test_block_that_never_gets_a_gradient_is_found_if_an_optimizer_holds_it() -> None:
    def detached() -> Any:
        model = gpt2(dropout=0.0)
        model.transformer.h[1].register_forward_pre_hook(lambda module, args: (args[0].detach(), *args[1:]))
        return model

    (alarm,) = [alarm for alarm in trained(build=detached) if alarm.name == "still_weights"]
    assert (alarm.layer, alarm.component, alarm.step) == (0, "gradients", 16)


@pytest.mark.parametrize("rate", [0.0, 1e-6])
def test_a_rate_of_zero_is_named_and_a_low_one_moves_weights(rate: float) -> None:
    found = [alarm for alarm in trained(lr=rate) if alarm.name == "still_weights"]
    assert [(alarm.component, "the learning rate is 0" in alarm.sentence) for alarm in found] == (
        [] if rate else [("rate", True)]
    )


@pytest.mark.parametrize("kept", [False, True])
def test_gradients_of_exactly_zero_are_an_alarm_and_a_margin_that_all_inputs_keep_is_none(kept: bool) -> None:
    def margin(model: Any, optimizer: Any, step: int) -> float:
        return max(0.0, 1.0 - step / 24) if kept else 0.0 if step >= 24 else 1.0

    found = alarms_raised(gpt2(dropout=0.0), margin, steps=48, every=2)
    named = [(one.name, one.component) for one in found if one.state == "raised"]
    assert named == [], "the loss is zero as well"
    no_gradients = trained(lambda model, optimizer, step: None, clip=lambda step: 0.0 if step >= 20 else 1.0)
    assert "still_weights" not in {one.name for one in no_gradients}, "read before clipping"


def test_blocks_that_an_optimizer_leaves_out_are_nobodys_fault() -> None:
    def upper(parameters: Any, **options: Any) -> Any:
        kept = list(parameters)
        return torch.optim.AdamW(kept[len(kept) // 2 :], **options)

    assert [alarm for alarm in trained(kind=upper) if alarm.name == "still_weights"] == []


def at(step: int, act: Callable[[Any], object]) -> Change:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, now: int) -> None:
        if now == step:
            with torch.no_grad():
                act(model)

    return change


def watched(model: Any, change: Change | None, *, loss_is_bad: bool = False) -> list[tuple[str, str, str]]:
    """Name, component and sentence of the alarms of a training in which something is changed before a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gauge = Gauge(model, {"input_ids": probe()["input_ids"]}, schedule=4, actions=(), strict=True)
    gauge.optimizers = (optimizer,)
    found = []
    for step, given in enumerate(batches(STEPS)):
        if change is not None:
            change(model, optimizer, step)
        optimizer.zero_grad()
        loss = model(**given).loss / (0.0 if loss_is_bad and step >= 36 else 1.0)
        loss.backward()
        gauge.after_backward(step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        reading = gauge.step(step, loss=loss)
        found += [] if reading is None else reading.alarms
    return [(alarm.name, alarm.component, alarm.sentence) for alarm in found if alarm.state == "raised"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["cls.predictions.transform.dense.weight", "bert.embeddings.word_embeddings.weight",
             "bert.encoder.layer.1.output.LayerNorm.weight"],
)  # fmt: skip
def test_first_parameter_that_is_not_finite_is_the_cause_although_an_update_spread_it(name: str) -> None:
    def spoil(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 36:
            model.get_parameter(name).data.fill_(math.nan)

    _, component, sentence = next(one for one in watched(bert(dropout=0.0), spoil) if one[0] == "not_finite")
    assert component == "weights"
    assert f"entries of {name}" in sentence
    assert "before the update" in sentence


def test_loss_that_is_not_finite_is_the_cause_although_an_update_spread_it() -> None:
    found = [one for one in watched(bert(dropout=0.0), None, loss_is_bad=True) if one[0] == "not_finite"]
    assert [component for _, component, _ in found] == ["loss"]
